"""vLLM's CPU worker that runs lookahead on the first model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import CompilationTimes

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.worker.cpu_attention import CPUTreeAttention
from lookahead_vllm.engine.worker.v1.runner import SynchronousRunner

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LookaheadCPUModelRunner(SynchronousRunner, CPUModelRunner):
    """vLLM's CPU runner with lookahead."""

    attention = CPUTreeAttention()


class LookaheadCPUWorker(cpu_worker.CPUWorker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        LookaheadCPUModelRunner.attention.register()
        if self.vllm_config.model_config.is_hybrid:
            from lookahead_vllm.engine.worker import recurrent_kernels_cpu

            recurrent_kernels_cpu.register()

    def init_device(self) -> None:
        with patches.swapped(cpu_worker, "CPUModelRunner", LookaheadCPUModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        self.model_runner.warm_up_drafting()
        return times

    def lookahead_weights_changed(self) -> None:
        """For `collective_rpc`: the model has got other weights in a way of the caller's own."""
        self.model_runner.drafter.weights_changed()
