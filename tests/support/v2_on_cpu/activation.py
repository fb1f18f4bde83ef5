"""Makes V2 vLLM's default on this CPU, in this process and in those that it starts."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODE = "LOOKAHEAD_TESTS_V2_ON_CPU"
"""The environment variable that says how V2 steps: "asynchronous" or "synchronous"."""
WORKER = "tests.support.v2_on_cpu.cpu_worker.LookaheadCPUWorker"
_FIRST_WORKER = "lookahead_vllm.engine.worker.v1.cpu_worker.LookaheadCPUWorker"
_PLUGIN = Path(__file__).with_name("plugin")
_PATHS = (str(Path(__file__).parents[3]), str(_PLUGIN))

_STAND_INS = (
    "block_tables",
    "input_batch",
    "logits",
    "logprobs",
    "sampling",
    "speculator",
    "thinking",
)
"""The modules of this package with stand-ins for kernels."""


def enable(asynchronous: bool = True) -> None:
    """Let engines that are made from now on use V2, unless VLLM_USE_V2_MODEL_RUNNER=0.

    Parameters
    ----------
    asynchronous : bool
        How engines step that do not say `async_scheduling`: as on a GPU, or synchronously.
    """
    os.environ.update(environment(asynchronous))
    sys.path.extend(path for path in _PATHS if path not in sys.path)  # spawned processes copy it
    _patch()
    _set_has_triton(True)


def disable() -> None:
    """Let engines that are made from now on use the runner that vLLM chooses for a CPU."""
    os.environ.pop(MODE, None)
    if "vllm.config.vllm" in sys.modules:
        _set_has_triton(False)


@contextmanager
def enabled(asynchronous: bool = True) -> Iterator[None]:
    """`enable` for engines that are made within the block."""
    before = os.environ.get(MODE)
    enable(asynchronous)
    try:
        yield
    finally:
        disable()
        if before is not None:
            enable(before == "asynchronous")


def environment(asynchronous: bool = True) -> dict[str, str]:
    """The variables with which a new process, such as `vllm serve`, uses V2."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([*_PATHS, *(folder for folder in given if folder not in ("", *_PATHS))])
    return {MODE: "asynchronous" if asynchronous else "synchronous", "PYTHONPATH": path}


def enable_as_the_parent_did() -> None:
    """The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""
    if mode := os.environ.get(MODE):
        enable(mode == "asynchronous")


def _set_has_triton(value: bool) -> None:
    """In those modules alone that ask whether V2 can run: 0.32 asks in the first, 0.33 in both."""
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = value
    worker: Any = sys.modules.get("vllm.v1.worker.gpu_worker")
    if hasattr(worker, "HAS_TRITON"):
        worker.HAS_TRITON = value


@functools.cache
def _patch() -> None:
    """Patch vLLM once in this process. The patches do nothing while `MODE` is not set."""
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    from lookahead_vllm.engine import config

    config.apply = _with_our_worker(config.apply)
    VllmConfig.__post_init__ = _choosing_synchronous_steps(VllmConfig.__post_init__)
    for name, around in (
        ("check_and_update_config", _keeping_asynchronous_steps),
        ("register_triton_kernel_overrides", _with_stand_ins),
    ):
        setattr(CpuPlatform, name, classmethod(around(vars(CpuPlatform)[name].__func__)))


def _with_our_worker(original: Callable[..., None]) -> Callable[..., None]:
    """`config.apply`, which chooses the first runner's worker for a CPU."""

    @functools.wraps(original)
    def apply(config: Any, options: Any, runner: Any) -> None:
        original(config, options, runner)
        if runner.name == "v2" and config.parallel_config.worker_cls == _FIRST_WORKER:
            config.parallel_config.worker_cls = WORKER

    return apply


def _choosing_synchronous_steps(original: Callable[..., None]) -> Callable[..., None]:
    """`VllmConfig.__post_init__`, which makes steps asynchronous unless told otherwise."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        scheduler = self.scheduler_config
        if scheduler.async_scheduling is None and os.environ.get(MODE) == "synchronous":
            scheduler.async_scheduling = False
        original(self)

    return post_init


def _keeping_asynchronous_steps(original: Callable[..., None]) -> Callable[..., None]:
    """`CpuPlatform.check_and_update_config`, which makes steps synchronous: V1 needs that."""

    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        is_asynchronous = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        if MODE in os.environ and vllm_config.use_v2_model_runner:
            vllm_config.scheduler_config.async_scheduling = is_asynchronous

    return check_and_update_config


def _with_stand_ins(original: Callable[..., None]) -> Callable[..., None]:
    """`CpuPlatform.register_triton_kernel_overrides`, which workers call before they load code."""

    @functools.wraps(original)
    def register_triton_kernel_overrides(cls: Any) -> None:
        if MODE in os.environ:
            _replace_kernels()
        original(cls)

    return register_triton_kernel_overrides


def load_stand_ins() -> None:
    """Import the modules that fill `stand_in.STAND_INS`, and those that lookahead needs."""
    importlib.import_module("tests.support.v2_on_cpu.implementations")
    for name in _STAND_INS:
        importlib.import_module(f"tests.support.v2_on_cpu.{name}")


@functools.cache
def _replace_kernels() -> None:
    """Replace the kernels of this process, once."""
    import vllm.v1.worker.cpu_worker  # noqa: F401  first: it replaces what other modules import
    from vllm.triton_utils import triton

    # vLLM's search for kernels in all modules fails at numba's without this module's repair.
    import lookahead_vllm.engine.worker.drafter  # noqa: F401
    from tests.support.hybrid_models import use_float32_gated_delta
    from tests.support.v2_on_cpu.stand_in import replace_kernels

    _set_has_triton(True)  # in the worker's module, too
    triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
    load_stand_ins()
    replace_kernels()
    use_float32_gated_delta()


def uses_stand_ins(worker: Any) -> bool:
    """For `collective_rpc`: whether this worker runs V2, with stand-ins."""
    from tests.support.v2_on_cpu.stand_in import STAND_INS, home_of

    module, name = home_of("gpu.sample.gumbel._gumbel_sample_kernel")
    is_replaced = getattr(module, name) is STAND_INS.get("gpu.sample.gumbel._gumbel_sample_kernel")
    return is_replaced and worker.use_v2_model_runner
