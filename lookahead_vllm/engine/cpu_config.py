"""Model Runner V2 on a CPU, for which vLLM's builds have no Triton.

vLLM would choose its first runner there. An engine with lookahead gets a config that says V2, and a
worker that brings the kernels (`cpu_kernels/`). A vLLM whose Triton runs on CPUs keeps its own.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import HAS_TRITON

from lookahead_vllm.engine import patches

PLAIN_WORKER = "lookahead_vllm.engine.workers.cpu.PlainCPUWorker"


class ConfigOnCPU(VllmConfig):
    """vLLM's config with Model Runner V2."""

    def __post_init__(self) -> None:
        with _v2_allowed():  # vLLM calls this again in the engine core's process
            super().__post_init__()

    @property
    def use_v2_model_runner(self) -> bool:
        return True


def is_needed() -> bool:
    """Whether V2 runs in this vLLM with our kernels alone."""
    return current_platform.is_cpu() and not HAS_TRITON


def make_plain(create: Callable[[], VllmConfig]) -> VllmConfig:
    """The config of an engine without lookahead, on V2."""
    config = make(create)
    if isinstance(config, ConfigOnCPU):
        config.parallel_config.worker_cls = PLAIN_WORKER
    return config


def make(create: Callable[[], VllmConfig]) -> VllmConfig:
    """The config that `create` makes, on V2 unless it asks for what V2 does not support."""
    if not is_needed():
        return create()
    with _v2_allowed():
        config = create()
        if config.use_v2_model_runner:
            config.__class__ = ConfigOnCPU
    return config


@contextmanager
def _v2_allowed() -> Iterator[None]:
    """vLLM makes configs with V2, and with asynchronous steps, in the block."""
    check = vars(CpuPlatform)["check_and_update_config"].__func__
    keeps = classmethod(_with_asynchronous_steps(check))
    with (
        patches.swapped(vllm_config, "HAS_TRITON", True),
        patches.swapped(CpuPlatform, "check_and_update_config", keeps),
    ):
        yield


def _with_asynchronous_steps(original: Callable[..., None]) -> Callable[..., None]:
    """`CpuPlatform.check_and_update_config`, which makes steps synchronous for the first runner."""

    @functools.wraps(original)
    def check_and_update_config(cls: Any, config: VllmConfig) -> None:
        is_asynchronous = config.scheduler_config.async_scheduling
        original(cls, config)
        if config.use_v2_model_runner:
            config.scheduler_config.async_scheduling = is_asynchronous

    return check_and_update_config
