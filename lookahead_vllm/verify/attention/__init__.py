"""Attention over vLLM's paged KV cache on GPUs, where some requests have draft trees.

Implemented in Triton, by xformers for part of the cases, and in plain PyTorch as the reference.
vLLM's cache on CPUs has another layout: see `cpu.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lookahead_vllm.verify.devices import Impl, module_for
from lookahead_vllm.verify.layout.paged_batch import PagedBatch

QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedCall(NamedTuple):
    """The arguments of `paged_attention`. The options are those of FlashAttention, by position."""

    query: Tensor
    """float32, bfloat16 or float16 [num_tokens, num_heads, head_size]."""
    key_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_size], as `value_cache`: the query's dtype, or
    fp8 with `k_scale` and `v_scale`. Any strides, but contiguous in the last dimension, as views of
    vLLM's caches, whose blocks have tokens or heads first."""
    value_cache: Tensor
    output: Tensor
    """[num_tokens, num_heads, head_size] or [num_tokens, num_heads * head_size], the query's dtype;
    written in place."""
    block_table: Tensor
    """int32 [num_reqs, max_blocks]: slot p is in block `block_table[row, p // block_size]`."""
    batch: PagedBatch
    """On the query's device."""
    scale: float
    """Factor of q . k."""
    sliding_window: int = -1
    """W: a row at position P attends to positions in (P - W, P]. -1 for none."""
    alibi_slopes: Tensor | None = None
    """float32 [num_heads]: adds slope * (key position - row position), after the soft cap."""
    soft_cap: float = 0.0
    """c > 0 replaces a score x by c * tanh(x / c)."""
    sinks: Tensor | None = None
    """[num_heads]: one more score per head in the softmax, with no value."""
    k_scale: Tensor | None = None
    """float32 [1], and so `v_scale`: factors of an fp8 cache's keys and values."""
    v_scale: Tensor | None = None
    context_lse: Tensor | None = None
    """float32 [num_heads, num_tokens]: `output` holds the attention of the rows to their contexts,
    and this is the logarithm of the sum of their exponentials, -inf without a context. The rows
    attend to the draft block alone, and both are merged; `sinks` and scales are those of the
    block."""


def paged_attention(call: PagedCall, impl: Impl = "auto") -> None:
    """Write the attention of the rows of `call.batch` to `call.output`; other rows stay unchanged.

    The K/V of all rows must already be in the cache. A slot that no row attends to has no effect,
    NaN and inf included. The result is FlashAttention's on a chain.

    Raises
    ------
    ValueError
        xformers does not support a dtype, a head size or an option.
    """
    _check(call)
    if not len(call.batch) or not call.batch.max_size:
        return
    module_for("attention", call.query.device, impl).attend(call)


def _check(call: PagedCall) -> None:
    query, key_cache, value_cache, output, block_table = call[:5]
    _, heads, head_size = query.shape
    is_fp8 = key_cache.dtype in FP8_DTYPES
    assert query.dtype in QUERY_DTYPES and output.dtype == query.dtype, (query.dtype, output.dtype)
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
