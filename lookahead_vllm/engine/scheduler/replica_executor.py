"""vLLM's executor, which starts the workers of several replicas."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from lookahead_vllm.engine import config


class ReplicaExecutor(MultiprocExecutor):
    """Starts `parallel` times the workers of tensor parallelism, as vLLM starts these.

    The workers' copies of the config say that all of them split the weights; each takes this back
    before it makes the model (`replica_group.become_replica`). Other processes never see it: vLLM
    checks that a model's heads can be split among as many ranks as its config names.
    """

    def _init_executor(self) -> None:
        parallel, replicas = self.parallel_config, config.options_of(self.vllm_config).parallel
        sizes = parallel.tensor_parallel_size, parallel.world_size
        parallel.tensor_parallel_size *= replicas
        parallel.world_size *= replicas
        try:
            super()._init_executor()
        finally:
            parallel.tensor_parallel_size, parallel.world_size = sizes
