"""Attention over vLLM's paged KV cache on GPUs, where some requests have draft trees.

Implemented in Triton, by xformers for part of the cases, and in plain PyTorch as the reference.
vLLM's cache on CPUs has another layout: see `cpu/tree_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from lookahead_vllm.verify.gpu.paged_batch import CAUSAL, PagedCall
from lookahead_vllm.verify.reference_attention import reference_attention

Impl = Literal["auto", "torch", "triton", "xformers"]

_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def paged_attention(call: PagedCall, impl: Impl = "auto") -> None:
    """Write the attention of the rows of `call.batch` to `call.output`; other rows stay unchanged.

    The K/V of all rows must already be in the cache. A slot that no row attends to has no effect,
    NaN and inf included. The result is FlashAttention's on a chain.

    Parameters
    ----------
    impl : {"auto", "torch", "triton", "xformers"}
        "auto" is "triton" on CUDA devices and "torch" on others.

    Raises
    ------
    ValueError
        xformers does not support a dtype, a head size or an option.
    """
    _check(call)
    if not len(call.batch) or not call.batch.max_size:
        return
    attend: Callable[[PagedCall], None] = _attend_torch
    if impl == "triton" or (impl == "auto" and call.query.device.type == "cuda"):
        from lookahead_vllm.verify.gpu.triton_attention import attend
    elif impl == "xformers":
        from lookahead_vllm.verify.gpu.xformers_attention import attend
    attend(call)


def _check(call: PagedCall) -> None:
    query, key_cache, value_cache, output, block_table = call[:5]
    _, heads, head_size = query.shape
    is_fp8 = key_cache.dtype in _FP8_DTYPES
    assert query.dtype in _QUERY_DTYPES and output.dtype == query.dtype, (query.dtype, output.dtype)
    assert is_fp8 or key_cache.dtype == query.dtype, (key_cache.dtype, query.dtype)
    assert {call.k_scale is not None, call.v_scale is not None} == {is_fp8}
    assert key_cache.dtype == value_cache.dtype and key_cache.shape == value_cache.shape
    assert key_cache.shape[3] == head_size and heads % key_cache.shape[2] == 0, key_cache.shape
    assert len(output) >= len(query) and output.shape[1:].numel() == heads * head_size
    assert all(tensor.stride(-1) == 1 for tensor in call[:5])
    assert block_table.dtype == torch.int32
    assert call.sliding_window == -1 or call.sliding_window > 0, call.sliding_window
    if call.context_lse is not None:
        assert call.context_lse.shape == (heads, len(query)), call.context_lse.shape
        assert call.context_lse.dtype == torch.float32 and not is_fp8 and call.sinks is None


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
    query, key_cache, value_cache, output, block_table, batch = call[:6]
    window, lse = call.sliding_window, call.context_lse
    if lse is not None:
        output = output.view(len(output), *query.shape[1:])
    block_size = key_cache.shape[1]
    for row, start, size, context, first in torch.stack(
        (batch.requests, batch.starts, batch.sizes, batch.contexts, batch.firsts), dim=1
    ).tolist():
        if not size:
            continue
        oldest = max(0, context - window + 1) if window > 0 else 0
        if lse is not None:
            oldest = context
        slots = torch.arange(oldest, context + size, device=query.device)
        blocks = block_table[row, slots // block_size].long()
        k = key_cache[blocks, slots % block_size].to(dtype)
        v = value_cache[blocks, slots % block_size].to(dtype)
        if call.k_scale is not None and call.v_scale is not None:
            k, v = k * call.k_scale, v * call.v_scale
        is_tree, own = first != CAUSAL, slice(first, first + size)
        rows = slice(start, start + size)
        yield (
            start,
            reference_attention(
                query[rows],
                k.transpose(0, 1),
                v.transpose(0, 1),
                context,
                batch.depths[own] if is_tree else None,
                batch.masks[own] if is_tree else None,
                scale=call.scale,
                sliding_window=window,
                alibi_slopes=call.alibi_slopes,
                soft_cap=call.logits_soft_cap,
                sinks=call.sinks,
                before=None if lse is None else (output[rows].to(dtype), lse[:, rows].to(dtype)),
            ),
        )
