"""vLLM's executor, which starts the workers of several replicas."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from lookahead_vllm.engine import config


class ReplicaExecutor(MultiprocExecutor):
    """Starts parallel × T workers as tensor-parallel ranks of vLLM.

    While they start, the config claims tensor_parallel_size × parallel; become_replica undoes this
    in each worker. Other processes never see it, because vLLM would reject models whose heads
    cannot be divided that far.
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
