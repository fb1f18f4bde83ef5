"""vLLM's CPU attention backend, with tree attention for the rows of requests with drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from lookahead_vllm import compilation
from lookahead_vllm.engine.attention import latent as latent_attention
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees, without_contexts
from lookahead_vllm.engine.attention.tree_attention import TreeAttention, dtype_obstacle
from lookahead_vllm.verify import native
from lookahead_vllm.verify.attention.cpu import TreeCall, supported, tree_attention
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from lookahead_vllm.verify.moves import SlotMover
from lookahead_vllm.verify.moves.cpu import KVMover, LatentMover

PACKED = {"vec": False, "vec16": False, "amx": True}
"""Whether the KV layout is packed, for each of vLLM's instruction sets that is supported."""


@dataclass(kw_only=True)
class TreeAttentionMetadata(CPUAttentionMetadata):
    """Metadata of a step with drafts."""

    trees: TreeBatch
    all_trees: bool
    """Tree attention computes every request of the batch, so the native kernel is skipped."""


class TreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Adds the step's trees to the metadata."""

    isa: str
    attended = AttendedTrees()
    """The runner's."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        trees = self.attended.trees
        if trees is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        without = without_contexts(common_attn_metadata, trees.requests, trees.sizes)
        built = super().build(common_prefix_len, without, fast_build)
        return TreeAttentionMetadata(
            **{f.name: getattr(built, f.name) for f in fields(built)},
            trees=trees,
            all_trees=len(trees.requests) == common_attn_metadata.num_reqs,
        )


class TreeAttentionImpl(CPUAttentionBackendImpl):
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: torch.Tensor | None,
    ) -> torch.Tensor:
        has_trees = (
            isinstance(attn_metadata, TreeAttentionMetadata)
            and self.attn_type == AttentionType.DECODER
        )
        if not (has_trees and attn_metadata.all_trees):
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        if has_trees:
            call = TreeCall(
                query,
                kv_cache,
                output,
                attn_metadata.block_table,
                attn_metadata.trees,
                self.scale,
                self.sliding_window,
                self.alibi_slopes,
                self.logits_soft_cap,
                self.sinks,
                PACKED[layer.isa],
            )
            tree_attention(call)
        return output


class TreeAttentionBackend(CPUAttentionBackend):
    get_impl_cls = staticmethod(lambda: TreeAttentionImpl)
    get_builder_cls = staticmethod(lambda: TreeAttentionMetadataBuilder)


class CPUTreeAttention(TreeAttention):
    """vLLM's backend for CPUs with compiled tree attention.

    It takes half of the time of vLLM's kernel for chains (docs/experiments.md). vLLM's latent
    attention computes a chain as a prompt, which rounds differently from decode rows.
    """

    replaces_chains = replaces_recurrent_chains = True

    def register(self) -> None:
        """Also load the kernels."""
        register_backend(
            AttentionBackendEnum.CPU_ATTN, f"{__name__}.{TreeAttentionBackend.__name__}"
        )
        latent_attention.register()
        # A plain engine in this process may have selected the backend already.
        selector._cached_get_attn_backend.cache_clear()
        compilation.wait()
        native.load()

    def obstacle(self, group: Any, layers: Sequence[Any], cache_dtype: str) -> str | None:
        if latent_attention.is_latent(layers):
            return latent_attention.obstacle(group, layers, cache_dtype)
        # Layers with another attention pattern (chunks, an encoder) use a backend derived from
        # ours.
        if group.backend is not TreeAttentionBackend:
            return f"there is no tree attention for the backend {group.backend.__name__}"
        builder = group.get_metadata_builder()
        if builder.isa not in PACKED:
            return f"the KV layout of instruction set {builder.isa!r} is unknown"
        if reason := dtype_obstacle(layers, builder.dtype):
            return reason
        if not supported(builder.head_dim, builder.dtype, builder.block_size, PACKED[builder.isa]):
            return (
                f"there is no tree attention for heads of {builder.head_dim} {builder.dtype} in "
                f"the KV layout {builder.isa!r}"
            )
        return None

    def unsupported_rows(self, groups: Sequence[Any]) -> str | None:
        """vLLM's kernel takes any cache for one of the model's dtype. If its elements are smaller,
        the keys and values of a block overlap, so a rejected draft would change them."""
        for builder in [group.get_metadata_builder() for group in groups]:
            if not isinstance(builder, CPUAttentionMetadataBuilder):
                continue
            cache, own = builder.kv_cache_spec.dtype, builder.dtype
            is_supported = builder.kv_cache_dtype in CPUAttentionBackend.supported_kv_cache_dtypes
            if not is_supported and cache.itemsize != own.itemsize:
                return f"vLLM's kernel for CPUs writes {own} into a KV cache of {cache}"
        return None

    def mover(self, kv_caches: Sequence[torch.Tensor], layer: Any) -> SlotMover:
        if latent_attention.is_latent([layer]):
            return LatentMover(kv_caches)
        return KVMover(kv_caches, kv_caches[0].shape[2], packed=PACKED[layer.isa])
