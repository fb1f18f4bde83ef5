"""Tree attention over vLLM's paged KV cache on CPUs."""

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lookahead_vllm.verify import native
from lookahead_vllm.verify.attention import QUERY_DTYPES
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from lookahead_vllm.verify.native import f32, fields, i32, i64, pointer


def supported(head_size: int, dtype: torch.dtype, block_size: int, packed: bool = False) -> bool:
    """Whether `tree_attention` supports layers of this shape; called at start-up.

    The packed layout takes AVX512-BF16, and a compiler that knows it.
    """
    return (
        head_size % 16 == 0
        and 32 <= head_size <= 512
        and dtype in QUERY_DTYPES
        and block_size % 16 == 0
        and (not packed or (dtype == torch.bfloat16 and native.load().lookahead_reads_packed()))
    )


class TreeCall(NamedTuple):
    """The arguments of `tree_attention`. The options are those of `PagedCall`."""

    query: Tensor
    """float32, bfloat16 or float16 [num_tokens, num_heads, head_size], contiguous in the last
    dimension."""
    kv_cache: Tensor
    """[num_blocks, num_kv_heads, block_size, 2 * head_size] of the query's dtype, in vLLM's layout
    for the instruction sets `vec` and `vec16`: for each block and head, K transposed [head_size,
    block_size], then V [block_size, head_size]. The first two dimensions may be strided. `packed`
    selects another layout."""
    output: Tensor
    """[num_tokens, num_heads, head_size] or [num_tokens, num_heads * head_size], the query's dtype;
    written in place."""
    block_table: Tensor
    """int32 [num_reqs, max_blocks]: slot p is in block `block_table[row, p // block_size]`."""
    batch: TreeBatch
    scale: float
    sliding_window: int = -1
    alibi_slopes: Tensor | None = None
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    packed: bool = False
    """The cache is bfloat16 in vLLM's layout for `amx`: for each block and head, K
    [block_size / 16, head_size / 2, 16, 2], whose last two dimensions are keys and head dimensions,
    then V [head_size / 16, block_size / 2, 16, 2], whose last two dimensions are head dimensions
    and keys."""


class TreeBatchView(ctypes.Structure):
    """`TreeBatchView` of `cpu.cpp`: the sizes and pointers of a TreeBatch."""

    _fields_ = [
        *fields(i64, "trees", "words"),
        *fields(pointer, "rows", "starts", "sizes", "contexts", "depths", "masks"),
    ]


class AttentionCall(ctypes.Structure):
    """`AttentionCall` of `cpu.cpp`; strides in elements."""

    _fields_ = [
        ("query", pointer),
        *fields(i64, "query_token", "query_head"),
        ("cache", pointer),
        *fields(i64, "cache_block", "cache_head"),
        ("output", pointer),
        *fields(i64, "output_token", "output_head"),
        ("block_table", pointer),
        ("table_row", i64),
        *fields(i32, "heads", "kv_heads", "head_size", "block_size"),
        ("scale", f32),
        ("window", i32),
        ("soft_cap", f32),
        *fields(pointer, "alibi", "sinks"),
        *fields(i32, "threads", "packed"),
    ]


def tree_attention(call: TreeCall) -> None:
    """Write the attention of every tree's rows to `call.output`; other rows stay unchanged.

    The K/V of the trees must already be in the cache. A slot that a row does not attend to has no
    effect on it, NaN and inf included. The result is that of vLLM's kernel on a chain.
    """
    _check(call)
    query, kv_cache, output, block_table, batch = call[:5]
    _, heads, head_size = query.shape
    _, kv_heads, block_size, _ = kv_cache.shape
    output_strides = output.stride()
    sinks = None if call.sinks is None else call.sinks.float()
    arguments = AttentionCall(
        query.data_ptr(), *query.stride()[:2],
        kv_cache.data_ptr(), *kv_cache.stride()[:2],
        output.data_ptr(), output_strides[0],
        output_strides[1] if len(output_strides) == 3 else head_size,
        block_table.data_ptr(), block_table.stride(0),
        heads, kv_heads, head_size, block_size,
        call.scale, call.sliding_window, call.soft_cap,
        _float_vector(call.alibi_slopes, heads), _float_vector(sinks, heads),
        torch.get_num_threads(), call.packed,
    )  # fmt: skip
    native.load().lookahead_tree_attention(
        ctypes.byref(_view(batch)), ctypes.byref(arguments), QUERY_DTYPES.index(query.dtype)
    )


def _check(call: TreeCall) -> None:
    query, kv_cache, output, block_table, batch = call[:5]
    tokens, heads, head_size = query.shape
    _, kv_heads, block_size, kv_width = kv_cache.shape
    assert supported(head_size, query.dtype, block_size, call.packed), (head_size, query.dtype)
    assert kv_cache.dtype == output.dtype == query.dtype, (kv_cache.dtype, output.dtype)
    assert kv_width == 2 * head_size and kv_cache.stride()[2:] == (kv_width, 1), kv_cache.stride()
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert len(output) >= tokens and output.shape[1:].numel() == heads * head_size, output.shape
    assert query.stride(-1) == output.stride(-1) == block_table.stride(-1) == 1
    assert block_table.dtype == torch.int32
    assert call.sliding_window == -1 or call.sliding_window > 0, call.sliding_window
    rows, max_blocks = block_table.shape
    ends, room = batch.ends, (rows, tokens, max_blocks * block_size)
    assert all(end <= most for end, most in zip(ends, room, strict=True)), (ends, room)


@functools.lru_cache(maxsize=1)  # all layers of a step have the same batch
def _view(batch: TreeBatch) -> TreeBatchView:
    """Its pointers, valid while the batch exists."""
    fields = (batch.requests, batch.starts, batch.sizes, batch.contexts, batch.depths, batch.masks)
    assert all(f.dtype == torch.int32 and f.is_contiguous() and not f.is_cuda for f in fields)
    assert len({len(f) for f in fields[:4]}) == 1 and len(batch.depths) == len(batch.masks)
    return TreeBatchView(len(batch), batch.masks.shape[1], *(f.data_ptr() for f in fields))


def _float_vector(values: Tensor | None, length: int) -> int | None:
    if values is None:
        return None
    assert values.dtype == torch.float32 and values.shape == (length,) and values.is_contiguous()
    return values.data_ptr()
