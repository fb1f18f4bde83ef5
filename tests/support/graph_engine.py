"""Engines on a CPU with captured graphs: the whole model is replayed as it was captured.

A replay runs the model once more with the inputs, the metadata and the forward context of the
capture, so it sees a step only through vLLM's persistent buffers and `GraphBuffers`. Attention is
written in torch for the cache layout of GPUs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.gpu import cudagraph_utils

from lookahead_vllm.engine.attention import gpu as gpu_attention
from lookahead_vllm.engine.runner.graph_runner import GraphRunner
from lookahead_vllm.engine.workers import cpu as cpu_worker
from tests.support import recorded_graphs, torch_pages

SIZES = [1, 2, 4, 6, 8, 16, 32, 64, 128]


class _Impl(CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sliding_window, self.logits_soft_cap = (-1, -1), 0.0

    def do_kv_cache_update(self, *args: Any) -> None:
        """`forward` writes keys and values, in another layout."""

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: torch.Tensor,
                metadata: Any, output: torch.Tensor, **scales: Any) -> torch.Tensor:  # fmt: skip
        if metadata is None:
            return output
        _write(key, value, kv_cache, metadata)
        self._over_pages(query, kv_cache, output, metadata, is_causal=True)
        return output

    def _over_pages(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor,
                    metadata: Any, is_causal: bool) -> torch.Tensor:  # fmt: skip
        return torch_pages.attend(
            query, kv_cache, metadata.query_start_loc, metadata.schedule, metadata.block_table,
            self.scale, is_causal, output.view(len(output), self.num_heads, -1),
        )  # fmt: skip


def _write(key: Any, value: Any, kv_cache: torch.Tensor, metadata: Any) -> None:
    slots = metadata.slot_mapping[: metadata.num_actual_tokens]
    torch_pages.write(torch.cat([key, value], dim=-1), slots, kv_cache)


class TorchImpl(gpu_attention._TreeImpl, _Impl):
    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: torch.Tensor,
                metadata: Any, output: torch.Tensor, **more: Any) -> torch.Tensor:  # fmt: skip
        if getattr(metadata, "is_of_contexts", False):
            _write(key, value, kv_cache, metadata)
        inputs = layer, query, key, value, kv_cache, metadata, output
        result: torch.Tensor = super().forward(*inputs, **more)
        return result

    def attend_contexts(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        return self._over_pages(query, kv_cache, output, metadata, is_causal=False)


class _Builder(CPUAttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.ALWAYS
    schedules = False
    """Whether a graph reads a copy of the lengths, as FlashAttention 3 reads its schedule."""
    _schedule = torch.zeros(256, dtype=torch.int32)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        metadata = SimpleNamespace(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            schedule=common.seq_lens,
        )
        if self.schedules:
            self.update_draft_decode_metadata(metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        if self.schedules:
            self._schedule[len(metadata.seq_lens) :] = 0
            metadata.schedule = self._schedule[: len(metadata.seq_lens)].copy_(metadata.seq_lens)


class TorchBuilder(gpu_attention._TreeBuilder, _Builder):
    @property
    def reads_buffers(self) -> bool:
        return not self.schedules


class TreeAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return TorchImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return TorchBuilder


class _Mover:
    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self.caches = caches

    def move_paths(self, origins: torch.Tensor, targets: torch.Tensor) -> None:
        size = self.caches[0].shape[2]
        for cache in self.caches:
            for source, target in zip(origins.T, targets.T, strict=True):
                cache[target // size, :, target % size] = cache[source // size, :, source % size]


class TorchTreeAttention(gpu_attention.GPUTreeAttention):
    replaces_recurrent_chains = True  # vLLM's kernels on a CPU are wrong there
    merges = False

    def merges_contexts(self, groups: Any, layers: Any) -> bool:
        return self.merges

    def register(self) -> None:
        name = f"{__name__}.{TreeAttentionBackend.__name__}"
        register_backend(AttentionBackendEnum.CPU_ATTN, name)
        selector._cached_get_attn_backend.cache_clear()

    def obstacle(self, group: Any, layers: Sequence[Any], cache_dtype: str) -> None:
        """None: every layer verifies trees."""

    def mover(self, kv_caches: Sequence[torch.Tensor], layer: Any) -> Any:
        return _Mover(kv_caches)


class Replay(NamedTuple):
    """A replayed graph."""

    num_tokens: int
    has_drafts: bool
    """Whether it is one for drafts."""
    num_trees: int
    num_prepared: int
    """The tokens of the graph that vLLM has prepared."""


class GraphCPURunner(GraphRunner, model_runner.CPUModelRunner):
    attention: Any = TorchTreeAttention()
    replays: list[Replay]
    num_tails: int
    """Replayed tails."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        config = self.compilation_config
        config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = SIZES, SIZES[-1]
        super().initialize_kv_cache(*args, **kwargs)
        self.replays, self.num_tails = [], 0
        manager = self.cudagraph_manager
        assert manager is not None
        begin, make_tail = manager.begin_graph, manager.make_tail
        manager.begin_graph = partial(recorded_graphs.launch, begin)
        if make_tail is not None:
            manager.make_tail = lambda *tail: recorded_graphs.recorded(make_tail(*tail))

        def model(**inputs: Any) -> torch.Tensor:
            output: torch.Tensor = self.model(**inputs)
            if recorded_graphs._captured:
                context = _contexts[-1]

                def run_again() -> None:
                    with forward_context.set_forward_context(*context[0], **context[1]):
                        assert manager.hidden_states is not None
                        manager.hidden_states[: len(output)] = self.model(**inputs)

                recorded_graphs._captured[-1].calls.append((run_again, (), {}))
            return output

        manager.capture(
            model, self.model_state, self.input_buffers, None, self.block_tables,
            self.attn_groups, self.kv_cache_config,
        )  # fmt: skip
        choose = manager.before_replay
        assert choose is not None

        def count(prepared: Any) -> Any:
            desc = choose(prepared)
            graph = self._buffers.get(desc.num_tokens) if desc.max_query_len else None
            trees = 0 if graph is None else graph.trees.num_trees
            self.replays.append(
                Replay(desc.num_tokens, desc.max_query_len is not None, trees, prepared.num_tokens)
            )
            return desc

        manager.before_replay = count
        replay_tail = manager.replay_tail

        def count_tail(*tail: Any) -> Any:
            self.num_tails += 1
            return replay_tail(*tail)

        manager.replay_tail = count_tail  # type: ignore[method-assign]


_contexts: list[tuple[tuple[Any, ...], dict[str, Any]]] = []


@contextmanager
def _noted_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    _contexts.append((args, kwargs))
    with forward_context.set_forward_context(*args, **kwargs):
        yield
    _contexts.pop()


def enable(patch: pytest.MonkeyPatch, schedules: bool = False, merges: bool = False) -> None:
    """Let the next lookahead engines capture graphs, with `_Builder.schedules` and
    `TorchTreeAttention.merges`."""
    patch.setattr(_Builder, "schedules", schedules)
    patch.setattr(TorchTreeAttention, "merges", merges)
    recorded_graphs.enable(patch)
    patch.setattr(cudagraph_utils, "set_forward_context", _noted_context)
    patch.setattr(cpu_worker, "LookaheadCPUModelRunner", GraphCPURunner)
