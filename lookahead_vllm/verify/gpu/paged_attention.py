"""Attention over vLLM's paged KV cache on GPUs, where some requests have draft trees.

Implemented in Triton, and in plain PyTorch as the reference. vLLM's cache on CPUs has another
layout: see `cpu/tree_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from lookahead_vllm.verify.gpu.paged_batch import CAUSAL, PagedBatch, PagedCall
from lookahead_vllm.verify.reference_attention import reference_attention

Impl = Literal["auto", "torch", "triton"]

_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    block_table: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int = -1,
    alibi_slopes: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Write the attention of the rows of `batch` to `output`; other rows stay unchanged.

    The K/V of all rows must already be in the cache. A slot that no row attends to has no effect,
    NaN and inf included. The options are those of FlashAttention, applied by position: both give
    the same result on a chain.

    Parameters
    ----------
    query : float32, bfloat16 or float16 [num_tokens, num_heads, head_size]
    key_cache, value_cache : [num_blocks, block_size, num_kv_heads, head_size]
        The query's dtype, or fp8 with `k_scale` and `v_scale`. Any strides, but contiguous in the
        last dimension: views of vLLM's [num_blocks, num_kv_heads, block_size, 2 * head_size], in
        both orders of tokens and heads, or of [num_blocks, 2, block_size, num_kv_heads, head_size].
    output : [num_tokens, num_heads, head_size] or [num_tokens, num_heads * head_size]
        The query's dtype; written in place.
    block_table : int32 [num_reqs, max_blocks]
        Slot p of a request is in block `block_table[row, p // block_size]`.
    batch : PagedBatch
        On the query's device.
    scale : float
        Factor of q . k.
    sliding_window : int
        W: a row at position P attends to positions in (P - W, P]. -1 for none.
    alibi_slopes : float32 [num_heads], optional
        Adds slope * (key position - row position), after the soft cap.
    logits_soft_cap : float
        c > 0 replaces a score x by c * tanh(x / c).
    sinks : [num_heads], optional
        One more score per head in the softmax, with no value.
    k_scale, v_scale : float32 [1], optional
        Factors of an fp8 cache's keys and values, on the query's device.
    impl : {"auto", "torch", "triton"}
        "auto" is "triton" on CUDA devices and "torch" on others.

    Raises
    ------
    ValueError
        Shapes, dtypes or options that do not fit.
    """
    call = PagedCall(
        query,
        key_cache,
        value_cache,
        output,
        block_table,
        batch,
        scale,
        sliding_window,
        alibi_slopes,
        logits_soft_cap,
        sinks,
        k_scale,
        v_scale,
    )
    _check(call)
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"impl is {impl!r}; choose 'auto', 'torch' or 'triton'")
    if not len(batch) or not batch.max_size:
        return
    attend: Callable[[PagedCall], None] = _attend_torch
    if impl == "triton" or (impl == "auto" and query.device.type == "cuda"):
        from lookahead_vllm.verify.gpu.triton_attention import attend
    attend(call)


def _check(call: PagedCall) -> None:
    query, key_cache, value_cache, output, block_table = call[:5]
    _, heads, head_size = query.shape
    kv_heads = key_cache.shape[2]
    if query.dtype not in _QUERY_DTYPES or output.dtype != query.dtype:
        raise ValueError(
            "query and output share float32, bfloat16 or float16; got "
            f"{query.dtype}, {output.dtype}"
        )
    is_fp8 = key_cache.dtype in _FP8_DTYPES
    if key_cache.dtype != value_cache.dtype or not (is_fp8 or key_cache.dtype == query.dtype):
        raise ValueError(
            f"the caches hold {key_cache.dtype} and {value_cache.dtype}; they hold the query's "
            f"{query.dtype}, or fp8"
        )
    if {call.k_scale is not None, call.v_scale is not None} != {is_fp8}:
        raise ValueError("k_scale and v_scale are given with an fp8 cache, and with no other")
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != head_size:
        raise ValueError(
            f"the caches are [num_blocks, block_size, num_kv_heads, {head_size}]; got "
            f"{list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    tensors = (query, key_cache, value_cache, output, block_table)
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("all tensors are contiguous in their last dimension")
    if output.shape[0] < len(query) or output.shape[1:].numel() != heads * head_size:
        raise ValueError(f"output is {list(output.shape)} for a query of {list(query.shape)}")
    if block_table.dtype != torch.int32:
        raise ValueError(f"block_table is int32, not {block_table.dtype}")
    if call.sliding_window != -1 and call.sliding_window < 1:
        raise ValueError(f"sliding_window is {call.sliding_window}; use -1 for none, or at least 1")


def _attend_torch(call: PagedCall) -> None:
    output = call.output.view(len(call.output), *call.query.shape[1:])
    for start, rows in reference_paged_attention(call):
        output[start : start + len(rows)] = rows.to(output.dtype)


def reference_paged_attention(
    call: PagedCall, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[int, Tensor]]:
    """Yield each request's first row in the query, and the attention of its rows.

    The attention is [rows, heads, head_size] of `dtype`. Synchronises with the device.
    """
    query, key_cache, value_cache, _, block_table, batch = call[:6]
    window = call.sliding_window
    block_size = key_cache.shape[1]
    for row, start, size, context, first in torch.stack(
        (batch.rows, batch.starts, batch.sizes, batch.contexts, batch.firsts), dim=1
    ).tolist():
        if not size:
            continue
        oldest = max(0, context - window + 1) if window > 0 else 0
        slots = torch.arange(oldest, context + size, device=query.device)
        blocks = block_table[row, slots // block_size].long()
        k = key_cache[blocks, slots % block_size].to(dtype)
        v = value_cache[blocks, slots % block_size].to(dtype)
        if call.k_scale is not None and call.v_scale is not None:
            k, v = k * call.k_scale, v * call.v_scale
        nodes = torch.arange(size, device=query.device)
        depths, in_mask = nodes, nodes[None, :] <= nodes[:, None]
        if first != CAUSAL:
            depths = batch.depths[first : first + size]
            words = batch.masks[first : first + size][:, nodes // 32]
            in_mask = (words >> (nodes % 32) & 1).bool()
        key_positions = slots.clone()
        key_positions[context - oldest :] = context + depths
        allowed = torch.ones(size, len(slots), dtype=torch.bool, device=query.device)
        allowed[:, context - oldest :] = in_mask
        yield (
            start,
            reference_attention(
                query[start : start + size],
                k.transpose(0, 1),
                v.transpose(0, 1),
                allowed,
                key_positions - (context + depths)[:, None],
                scale=call.scale,
                sliding_window=window,
                alibi_slopes=call.alibi_slopes,
                soft_cap=call.logits_soft_cap,
                sinks=call.sinks,
            ),
        )
