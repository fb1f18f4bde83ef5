"""vLLM's CPU worker on Model Runner V2, with lookahead and without."""

from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.worker import cpu_worker, gpu_worker
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.worker_base import CompilationTimes

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.attention.cpu import CPUTreeAttention
from lookahead_vllm.engine.config import options_of
from lookahead_vllm.engine.cpu_kernels import table
from lookahead_vllm.engine.replicas.replicas import become_replica
from lookahead_vllm.engine.replicas.runner import ReplicaRunner
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.verify.walk import compile_walk


class LookaheadCPUModelRunner(LookaheadRunner, model_runner.CPUModelRunner):
    """vLLM's CPU runner with lookahead."""

    attention = CPUTreeAttention()


class ReplicaCPUModelRunner(ReplicaRunner, LookaheadCPUModelRunner):
    """vLLM's CPU runner with lookahead, under lookahead parallelism."""


class PlainCPUWorker(cpu_worker.CPUWorker):
    """vLLM's CPU worker, with kernels for Model Runner V2."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        table.install()
        with patches.swapped(gpu_worker, "HAS_TRITON", True):  # vLLM 0.33 asks here, too
            super().__init__(vllm_config, *args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Without states from the middle of a chunk, which vLLM's kernels for CPUs do not return.

        Then chunks of prompts end where prefixes are cached.
        """
        return {
            name: replace(spec, num_prefill_checkpoint_blocks=0)
            if isinstance(spec, MambaSpec)
            else spec
            for name, spec in super().get_kv_cache_spec().items()
        }


class LookaheadCPUWorker(PlainCPUWorker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        become_replica(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        LookaheadCPUModelRunner.attention.register()
        if self.vllm_config.model_config.is_hybrid:
            from lookahead_vllm.engine.recurrent import cpu as recurrent_kernels_cpu

            recurrent_kernels_cpu.register()

    def init_device(self) -> None:
        is_replica = options_of(self.vllm_config).parallel > 1
        runner = ReplicaCPUModelRunner if is_replica else LookaheadCPUModelRunner
        with patches.swapped(model_runner, "CPUModelRunner", runner):
            super().init_device()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        self.model_runner.draft_for_stages(scheduler_output)
        return super().execute_model(scheduler_output)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times, runner = super().compile_or_warm_up_model(), self.model_runner
        compile_walk(1, runner.device)
        runner.compile_node_kernels()
        if self.vllm_config.kernel_config.enable_jit_warmup:  # as vLLM does on a GPU
            with runner.warming_up():
                warmup_kernels(runner, self.execute_model, self.sample_tokens)
        runner.warm_up_drafting()
        return times
