"""Latent attention (MLA) with tree attention for the rows of branching trees, on any device.

vLLM's dense backends for latent attention share a metadata builder and the layer around them, so
two patches serve them all. vLLM computes the rows of a tree without their context; afterwards they
are overwritten. They attend as vLLM's decode rows do: the queries are projected into the space of
the latents (weight absorption).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees, without_contexts
from lookahead_vllm.engine.attention.tree_attention import dtype_obstacle
from lookahead_vllm.verify.latent import LatentCall, latent_attention
from lookahead_vllm.verify.latent.decode_rows import DecodeRows, decode_rows
from lookahead_vllm.verify.layout.paged_batch import PagedBatch


class StepTrees(NamedTuple):
    """What the metadata of a step with trees has in addition to vLLM's."""

    batch: PagedBatch
    block_table: torch.Tensor
    """The block table of all requests of the step."""
    decode_rows: DecodeRows | None = None
    """On a CPU: the same rows, for vLLM's decode kernel."""


def register() -> None:
    """Patch vLLM, in a process that serves lookahead."""
    if not patches.is_patched(MLAAttention):
        patches.patch(MLACommonMetadataBuilder, "build", _with_trees)
        patches.patch(MLAAttention, "forward_impl", _then_trees)


def is_latent(layers: Sequence[Any]) -> bool:
    """Whether these layers of one attention group have latent attention."""
    return isinstance(layers[0], MLAAttention)


def obstacle(group: Any, layers: Sequence[Any], cache_dtype: str) -> str | None:
    """Why the layers of an attention group cannot verify branching trees, or None if they can."""
    name = group.backend.__name__
    # A subclass may attend in another way. vLLM's backend for AMX keeps no W_UK_T.
    if any(type(layer) is not MLAAttention or not hasattr(layer, "W_UK_T") for layer in layers):
        return f"there is no tree attention for the backend {name}"
    if any(layer.use_sparse or layer.sliding_window is not None for layer in layers):
        return "latent attention does not see the whole context"
    if is_quantized_kv_cache(cache_dtype) and cache_dtype not in ("fp8", "fp8_e4m3"):
        return f"there is no tree attention over a latent cache of {cache_dtype}"
    config = group.get_metadata_builder().vllm_config
    if config.compilation_config.pass_config.fuse_attn_quant:
        return "latent attention quantizes its output"
    if is_quantized_kv_cache(cache_dtype):
        return None
    return dtype_obstacle(layers, config.model_config.dtype)


def _with_trees(build: Callable[..., MLACommonMetadata]) -> Callable[..., MLACommonMetadata]:
    """`MLACommonMetadataBuilder.build`, which adds the step's trees."""

    def build_with_trees(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLACommonMetadata:
        common = common_attn_metadata
        if common.seq_lens.device.type == "cpu":
            # vLLM treats a request of one token after longer requests as a prompt, and reads its
            # length on the host, where the runner counts the last step's drafts as tokens.
            common = replace(common, seq_lens_cpu_upper_bound=common.seq_lens)
        trees = getattr(self, "attended", AttendedTrees()).trees
        if trees is None:
            return build(self, common_prefix_len, common, fast_build)
        batch = PagedBatch.build(trees, self.device)
        common = without_contexts(common, batch.requests, batch.sizes)
        if (bound := common.seq_lens_cpu_upper_bound) is not None:
            bound = bound.clone()
            bound[trees.requests.long()] = trees.sizes.to(bound.dtype)
            common = replace(common, seq_lens_cpu_upper_bound=bound)
        built: Any = build(self, common_prefix_len, common, fast_build)
        table, rows = common_attn_metadata.block_table_tensor, None
        if self.device.type == "cpu":
            rows = decode_rows(batch, table, self.kv_cache_spec.block_size)
        built.trees = StepTrees(batch, table, rows)
        return built

    return build_with_trees


def _then_trees(forward_impl: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`MLAAttention.forward_impl`, after which the rows of branching trees are overwritten."""

    def forward_trees(
        self: MLAAttention,
        q: torch.Tensor,
        k_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        result = forward_impl(
            self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if (trees := getattr(attn_metadata, "trees", None)) is not None:
            attend_trees(self, q, kv_cache, output, trees)
        return result

    return forward_trees


def attend_trees(
    layer: Any, q: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, trees: StepTrees
) -> None:
    """Overwrite the rows of branching trees in `output`."""
    rows = trees.batch.tokens.long()
    nope, rotary = q[rows].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    absorbed = torch.bmm(nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
    query = torch.cat((absorbed, rotary), dim=-1)
    if trees.decode_rows is not None:
        latents = _attend_as_decode(layer, query, kv_cache, trees.decode_rows)
    else:
        latents = query.new_empty(*query.shape[:2], layer.kv_lora_rank)
        cache_scale = None
        if is_quantized_kv_cache(layer.kv_cache_dtype):
            kv_cache = kv_cache.view(current_platform.fp8_dtype())
            cache_scale = layer._k_scale.reshape(1)
        table, batch = trees.block_table, trees.batch
        latent_attention(
            LatentCall(query, kv_cache, latents, table, batch, layer.scale, cache_scale)
        )
    values = output.new_empty(len(rows), output[0].numel())
    layer._v_up_proj(latents, values)
    output[rows] = values.view(-1, *output.shape[1:])


def _attend_as_decode(
    layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, rows: DecodeRows
) -> torch.Tensor:
    """Attend with vLLM's decode kernel, so that a row is rounded as in plain decode.

    The kernel reads no masks, so each row becomes a request of its own, over a copy of the latents
    that it attends to.
    """
    width = kv_cache.shape[-1]
    copied = kv_cache.view(-1, width)[rows.slots].view(-1, kv_cache.shape[1], width)
    decode = SimpleNamespace(block_table=rows.block_table, seq_lens=rows.lengths)
    latents: torch.Tensor
    latents, _ = layer.impl.forward_mqa(query, copied, SimpleNamespace(decode=decode), layer)
    return latents


def warm_up(layer: Any, dtype: torch.dtype) -> None:
    """Compile the kernels of a step with trees, so that no request waits for it."""
    from lookahead_vllm.verify.layout.paged_batch import empty_batches

    device = layer.kv_cache.device
    q = torch.zeros(1, layer.num_heads, layer.qk_head_dim, dtype=dtype, device=device)
    output = torch.zeros(1, layer.num_heads * layer.v_head_dim, dtype=dtype, device=device)
    block_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for batch in empty_batches(1, device):
        attend_trees(layer, q, layer.kv_cache, output, StepTrees(batch, block_table))
