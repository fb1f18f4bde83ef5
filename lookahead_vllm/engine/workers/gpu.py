"""vLLM's CUDA worker that runs lookahead on Model Runner V2."""

from itertools import chain
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.attention.gpu import GPUTreeAttention
from lookahead_vllm.engine.config import options_of
from lookahead_vllm.engine.recurrent.states import RequestStates, is_recurrent
from lookahead_vllm.engine.replicas.replicas import become_replica
from lookahead_vllm.engine.replicas.runner import ReplicaRunner
from lookahead_vllm.engine.runner.graph_runner import GraphRunner
from lookahead_vllm.verify.moves.triton import move_nothing
from lookahead_vllm.verify.walk import compile_walk


class LookaheadGPUModelRunner(GraphRunner, model_runner.GPUModelRunner):
    """vLLM's CUDA runner with lookahead."""

    attention = GPUTreeAttention()
    sizes_steps = True

    def compile_kernels(self) -> None:
        """Compile every kernel that a step with drafts launches."""
        if self.drafter.may_branch:
            layers = self.compilation_config.static_forward_context
            groups = chain.from_iterable(self.attn_groups)
            own = [layers[name] for group in groups for name in group.layer_names]
            own = [layer for layer in own if not is_recurrent(layer)]
            attention = options_of(self.vllm_config).attention
            self.attention.warm_up(own, self.dtype, attention)
            movers = filter(None, self._branching.movers)
            move_nothing(m for m in movers if not isinstance(m, RequestStates))
        compile_walk(self.decode_query_len + 1, self.device)  # see `width_of`
        self.compile_node_kernels()

    def shutdown(self) -> None:
        self._buffers = {}
        super().shutdown()


class ReplicaGPUModelRunner(ReplicaRunner, LookaheadGPUModelRunner):
    """vLLM's CUDA runner with lookahead, under lookahead parallelism."""


class LookaheadGPUWorker(Worker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        become_replica(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        LookaheadGPUModelRunner.attention.register()
        if self.vllm_config.model_config.is_hybrid:
            from lookahead_vllm.engine.recurrent import gpu as recurrent_kernels_gpu

            recurrent_kernels_gpu.register()

    def _make_model_runner(self) -> Any:
        is_replica = options_of(self.vllm_config).parallel > 1
        runner = ReplicaGPUModelRunner if is_replica else LookaheadGPUModelRunner
        with patches.swapped(model_runner, "GPUModelRunner", runner):
            return super()._make_model_runner()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        self.model_runner.draft_for_stages(scheduler_output)
        return super().execute_model(scheduler_output)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        runner = self.model_runner
        runner.compile_kernels()
        with runner.warming_up():
            times = super().compile_or_warm_up_model()
        runner.warm_up_drafting()
        return times
