"""Lookahead's steps on the simulated device as on a GPU: the model, and what follows it, in graphs.

A replay is one launch. What it computes stands in for kernels, and is called anew instead of being
captured (tests record and replay it).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.device.host_work import HostWork
from benchmarks.device.stand_ins import HIDDEN_SIZE

SIZES = [1, 2, 4, *range(8, 513, 8), *range(576, 8193, 64)]


class _Graph(NamedTuple):
    replay: Callable[[], None]


def install(work: HostWork) -> None:
    """Let lookahead's engines of this process have graphs. Call it before one is made."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner
    from vllm.v1.worker.gpu import cudagraph_utils

    from lookahead_vllm.engine.attention.cpu import CPUTreeAttention
    from lookahead_vllm.engine.runner.draft_graphs import Tail
    from lookahead_vllm.engine.runner.graph_runner import GraphRunner
    from lookahead_vllm.engine.workers import cpu as cpu_worker

    class DeviceGraphRunner(GraphRunner, CPUModelRunner):
        attention = CPUTreeAttention()
        sizes_steps = True

        def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
            config = self.compilation_config
            config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            # Else the largest steps have no graph.
            most = min(self.max_num_reqs * self.decode_query_len, self.max_num_tokens)
            sizes = [*(size for size in SIZES if size < most), most]
            config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = sizes, most
            super().initialize_kv_cache(*args, **kwargs)
            for builder in self._builders:  # as those of FlashAttention 3
                builder.reads_buffers, builder.refresh = True, lambda buffers: None
            manager = self.cudagraph_manager
            assert manager is not None and manager.make_tail is not None
            manager.hidden_states = torch.zeros(most, HIDDEN_SIZE)
            manager._graphs_captured = True
            for desc in manager._capture_descs[CUDAGraphMode.FULL]:
                manager.graphs[desc] = _Graph(work.kernel(self._model_of(desc), 0))
            for desc in manager.descs_with_tails():
                for number in manager.numbers_of_choices:
                    manager.tails[desc, number] = self._tail_of(desc, number)

        def _varlen_obstacle(self) -> None:
            """None: attention is not run."""

        def _model_of(self, desc: Any) -> Callable[[], None]:
            def replay() -> None:
                manager: Any = self.cudagraph_manager
                inputs = self.input_buffers
                if desc.max_query_len is not None:
                    self._begin_graph(desc)
                num_rows = self._shape.split.num_rows if self.step.graph else desc.num_tokens
                rows = slice(num_rows)
                manager.hidden_states[rows] = self.model.forward(
                    inputs.input_ids[rows], inputs.positions[rows]
                )

            return replay

        def _tail_of(self, desc: Any, num_choices: int) -> Tail:
            launch = self._make_tail(desc, num_choices)
            result = launch()

            def replay() -> None:
                for old, new in zip(result, launch(), strict=True):
                    if old is not None:
                        old.copy_(new)

            return Tail(_Graph(work.kernel(replay)), result)

    CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.ALWAYS
    for owner, name, replacement in (
        (cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)),
        (cpu_worker, "LookaheadCPUModelRunner", DeviceGraphRunner),
    ):
        setattr(owner, name, replacement)
