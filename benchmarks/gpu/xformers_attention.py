"""Tree attention over a paged KV cache on a GPU with xformers' kernels, to compare ours with.

One call attends to the context's pages without a mask, another to the draft block with a dense
mask. Both results are merged by their log-sum-exps. Every tree is padded to the largest, and the
context lengths are read from the device. Not run on a GPU so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lookahead_vllm.verify.gpu.paged_batch import PagedBatch, PagedCall


def attend(call: PagedCall) -> None:
    """`paged_attention` for pages with tokens before heads, without any of its options.

    Raises
    ------
    ValueError
        xformers is not installed, or has no kernel for an option or the layout.
    """
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask
    except ImportError:
        raise ValueError("xformers is not installed: pip install xformers") from None
    options = {
        "sliding_window": call.sliding_window > 0,
        "alibi_slopes": call.alibi_slopes is not None,
        "logits_soft_cap": call.logits_soft_cap > 0,
        "sinks": call.sinks is not None,
        "fp8 caches": call.k_scale is not None,
    }
    if given := [name for name, is_given in options.items() if is_given]:
        raise ValueError(f"xformers has no kernel for {' and '.join(given)}")
    query, key_cache, value_cache, output, block_table, batch = call[:6]
    _, heads, head_size = query.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    for cache in (key_cache, value_cache):
        if cache.stride(0) != block_size * cache.stride(1):
            raise ValueError("xformers reads only contiguous pages with tokens before heads")
    group = heads // kv_heads
    requests, max_size = len(batch), batch.max_size
    nodes = torch.arange(max_size, device=query.device)
    is_row = nodes < batch.sizes[:, None]
    places = batch.starts[:, None] + torch.where(is_row, nodes, 0)
    q = query[places].unflatten(2, (kv_heads, group))  # [requests, max_size, kv_heads, group, d]

    def paged(cache: Tensor) -> Tensor:
        flat = cache.as_strided(
            (1, num_blocks * block_size, kv_heads, 1, head_size),
            (0, cache.stride(1), cache.stride(2), 0, 1),
            cache.storage_offset(),
        )
        return flat.expand(-1, -1, -1, group, -1)

    context, context_lse = fmha.memory_efficient_attention_partial(
        q.reshape(1, requests * max_size, kv_heads, group, head_size),
        paged(key_cache),
        paged(value_cache),
        attn_bias=PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[max_size] * requests,
            kv_seqlen=batch.contexts.tolist(),
            block_tables=block_table[batch.requests.long()].contiguous(),
            page_size=block_size,
            device=query.device,
        ),
        scale=call.scale,
    )
    context = context.view(requests, max_size, kv_heads, group, head_size)
    context_lse = context_lse.view(kv_heads, group, requests, max_size).permute(2, 0, 1, 3)
    is_empty = (batch.contexts == 0)[:, None, None, None]
    context = context.masked_fill(is_empty[..., None], 0)
    context_lse = context_lse.masked_fill(is_empty, -torch.inf)

    slots = batch.contexts[:, None] + torch.where(is_row, nodes, 0)
    pages = block_table[batch.requests.long()[:, None], slots // block_size].long()
    k, v = (
        cache[pages, slots % block_size].unsqueeze(3).expand(-1, -1, -1, group, -1)
        for cache in (key_cache, value_cache)
    )
    draft, draft_lse = fmha.memory_efficient_attention_partial(
        q,
        k,
        v,
        attn_bias=_bias(batch, nodes, is_row, kv_heads, group, query.dtype),
        scale=call.scale,
    )
    merged, _ = fmha.merge_attentions(
        [context, draft], [context_lse, draft_lse], write_lse=False, output_dtype=query.dtype
    )
    output.view(len(output), heads, head_size)[places[is_row]] = merged.flatten(2, 3)[is_row]


def _bias(
    batch: PagedBatch,
    nodes: Tensor,
    is_row: Tensor,
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """The mask, 0 or -inf: [requests, kv_heads, group, max_size, max_size].

    Padding rows attend to the root.
    """
    is_tree = (batch.firsts >= 0)[:, None, None]
    attended = (nodes[None, :] <= nodes[:, None]).expand(len(batch), -1, -1)
    if len(batch.masks):
        rows = (batch.firsts.clamp(min=0)[:, None] + nodes).clamp(max=len(batch.masks) - 1)
        words = batch.masks[rows][..., (nodes // 32).clamp(max=batch.masks.shape[1] - 1)]
        attended = torch.where(is_tree, (words >> (nodes % 32) & 1).bool(), attended)
    attended = torch.where(is_row[:, :, None], attended, nodes == 0)
    width = -(-len(nodes) // 8) * 8  # xformers requires a row stride that is a multiple of 8
    bias = torch.full((*attended.shape[:2], width), -torch.inf, dtype=dtype, device=attended.device)
    bias[..., : len(nodes)].masked_fill_(attended, 0)
    bias = bias[:, None, None].expand(-1, kv_heads, group, -1, -1)
    return bias[..., : len(nodes)]
