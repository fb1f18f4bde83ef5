"""vLLM's CUDA worker that runs lookahead on the first model runner. Not run on a GPU yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.config import options_of
from lookahead_vllm.engine.worker import gpu_attention
from lookahead_vllm.engine.worker.recurrent import is_recurrent
from lookahead_vllm.engine.worker.replicas import become_replica
from lookahead_vllm.engine.worker.v1.replica_runner import ReplicaRunner
from lookahead_vllm.engine.worker.v1.runner import LookaheadRunner
from lookahead_vllm.verify.recurrence import StateMover

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LookaheadGPUModelRunner(LookaheadRunner, gpu_model_runner.GPUModelRunner):
    """vLLM's CUDA runner with lookahead."""

    attention = gpu_attention

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.model_config.is_hybrid:  # recurrent layers need graphs of the longest draft
            capture_steps_without_drafts(self)

    def compile_kernels(self) -> None:
        """Compile what a step launches, so that no request waits for it."""
        super().compile_kernels()
        if self.drafter.may_branch:
            context = self.compilation_config.static_forward_context
            names = [n for group in self._attn_group_iterator() for n in group.layer_names]
            layers = [context[n] for n in names if not is_recurrent(context[n])]
            movers = [mover for mover in self._movers if not isinstance(mover, StateMover)]
            gpu_attention.warm_up(layers, movers, self.dtype)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """Steps with branching trees run in piecewise graphs: a full graph cannot hold the step's
        masks. Chains use vLLM's choice."""
        run = functools.partial(super()._determine_batch_execution_and_padding, *args, **kwargs)
        return determine_in_pieces(self, run)


def capture_steps_without_drafts(runner: Any) -> None:
    """Capture full graphs for one token a request, as plain vLLM does.

    By default vLLM would capture them for the longest draft and round all graph sizes up to
    multiples of it.
    """
    runner.uniform_decode_query_len = 1
    runner.cudagraph_dispatcher.uniform_decode_query_len = 1


def determine_in_pieces(runner: Any, run: Callable[[], Any]) -> Any:
    """Call run() with full graphs disabled if the step has branching trees."""
    if not runner._step.branches:
        return run()
    dispatcher = runner.cudagraph_dispatcher
    original = dispatcher.dispatch

    def dispatch(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        return original(*args, invalid_modes={*(invalid_modes or ()), CUDAGraphMode.FULL}, **kwargs)

    with patches.swapped(dispatcher, "dispatch", dispatch):
        return run()


class ReplicaGPUModelRunner(ReplicaRunner, LookaheadGPUModelRunner):
    """vLLM's CUDA runner with lookahead, under lookahead parallelism."""


class LookaheadGPUWorker(Worker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        become_replica(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        gpu_attention.register()
        if self.vllm_config.model_config.is_hybrid:
            from lookahead_vllm.engine.worker import recurrent_kernels_gpu

            recurrent_kernels_gpu.register()

    def _make_model_runner(self) -> Any:
        is_replica = options_of(self.vllm_config).parallel > 1
        runner = ReplicaGPUModelRunner if is_replica else LookaheadGPUModelRunner
        with patches.swapped(gpu_model_runner, "GPUModelRunner", runner):
            return super()._make_model_runner()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.model_runner.compile_kernels()  # before vLLM begins to report late compilations
        times = super().compile_or_warm_up_model()
        self.model_runner.warm_up_drafting()
        return times
