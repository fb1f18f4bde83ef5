"""vLLM's CUDA worker with a lookahead runner inside. Chains only; not run on a GPU yet."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from lookahead_vllm.engine.runner import LookaheadRunner


class LookaheadGPUModelRunner(LookaheadRunner, gpu_model_runner.GPUModelRunner):
    """vLLM's CUDA runner with lookahead."""


class LookaheadGPUWorker(Worker):
    def _make_model_runner(self) -> Any:
        original = gpu_model_runner.GPUModelRunner
        gpu_model_runner.GPUModelRunner = LookaheadGPUModelRunner
        try:
            return super()._make_model_runner()
        finally:
            gpu_model_runner.GPUModelRunner = original

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        self.model_runner.warm_up_drafting()
        return times
