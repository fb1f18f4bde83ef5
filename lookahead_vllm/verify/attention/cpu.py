"""Tree attention over vLLM's paged KV cache on CPUs."""

from __future__ import annotations

import ctypes
import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lookahead_vllm.verify import native
from lookahead_vllm.verify.attention.reference import reference_attention
from lookahead_vllm.verify.layout.tree_batch import TreeBatch

Impl = Literal["auto", "torch", "native"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def supported(head_size: int, dtype: torch.dtype, block_size: int, packed: bool = False) -> bool:
    """Whether `tree_attention` supports layers of this shape; called at start-up."""
    return (
        head_size % 16 == 0
        and 32 <= head_size <= 512
        and dtype in _DTYPES
        and (block_size % 16 == 0)
        and (not packed or dtype == torch.bfloat16)
    )


class TreeCall(NamedTuple):
    """The arguments of `tree_attention`. The options are those of `gpu.paged_batch.PagedCall`."""

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


def tree_attention(call: TreeCall, impl: Impl = "auto") -> None:
    """Write the attention of every tree's rows to `call.output`; other rows stay unchanged.

    The K/V of the trees must already be in the cache. A slot that a row does not attend to has no
    effect on it, NaN and inf included. The result is that of vLLM's kernel on a chain.

    Parameters
    ----------
    impl : {"auto", "torch", "native"}
        "auto" uses the compiled kernel for CPU tensors if it is available.
    """
    _check(call)
    if impl == "auto":
        available = native.reads_packed if call.packed else native.available
        impl = "native" if call.query.device.type == "cpu" and available() else "torch"
    attend = _attend_native if impl == "native" else _attend_torch
    attend(call)


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


def _attend_native(call: TreeCall) -> None:
    library = native.load()
    assert library is not None and (not call.packed or native.reads_packed())
    query, kv_cache, output, block_table, batch = call[:5]
    _, heads, head_size = query.shape
    _, kv_heads, block_size, _ = kv_cache.shape
    output_strides = output.stride()
    sinks = None if call.sinks is None else call.sinks.float()
    arguments = native.AttentionCall(
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
    library.lookahead_tree_attention(
        ctypes.byref(_view(batch)), ctypes.byref(arguments), _DTYPES[query.dtype]
    )


@functools.lru_cache(maxsize=1)  # all layers of a step have the same batch
def _view(batch: TreeBatch) -> native.TreeBatchView:
    """Its pointers, valid while the batch exists."""
    fields = (batch.requests, batch.starts, batch.sizes, batch.contexts, batch.depths, batch.masks)
    assert all(f.dtype == torch.int32 and f.is_contiguous() and not f.is_cuda for f in fields)
    assert len({len(f) for f in fields[:4]}) == 1 and len(batch.depths) == len(batch.masks)
    return native.TreeBatchView(len(batch), batch.masks.shape[1], *(f.data_ptr() for f in fields))


def _float_vector(values: Tensor | None, length: int) -> int | None:
    if values is None:
        return None
    assert values.dtype == torch.float32 and values.shape == (length,) and values.is_contiguous()
    return values.data_ptr()


def _attend_torch(call: TreeCall) -> None:
    query, kv_cache, output, block_table, batch = call[:5]
    _, heads, head_size = query.shape
    window = call.sliding_window
    block_size = kv_cache.shape[2]
    blocks_flat = kv_cache.flatten(2)
    if output.dim() == 2:
        output = output.unflatten(1, (heads, head_size))
    depths, masks = batch.depths.to(query.device), batch.masks.to(query.device)
    end = 0
    for row, start, size, context in torch.stack(
        (batch.requests, batch.starts, batch.sizes, batch.contexts), dim=1
    ).tolist():
        own, end = slice(end, end + size), end + size
        oldest = max(0, context - window + 1) if window > 0 else 0
        first_block, end_block = oldest // block_size, (context + size - 1) // block_size + 1
        kv = blocks_flat[block_table[row, first_block:end_block].long()]
        k, v = (
            part.flatten(2, 3).flatten(3).transpose(0, 1).flatten(1, 2).float()
            for part in keys_and_values(kv, head_size, block_size, call.packed)
        )
        num_keys = context + size - first_block * block_size
        output[start : start + size] = reference_attention(
            query[start : start + size],
            k[:, :num_keys],
            v[:, :num_keys],
            context,
            depths[own],
            masks[own],
            scale=call.scale,
            sliding_window=window,
            alibi_slopes=call.alibi_slopes,
            soft_cap=call.soft_cap,
            sinks=call.sinks,
        ).to(output.dtype)


def keys_and_values(
    blocks: Tensor, head_size: int, block_size: int, packed: bool
) -> tuple[Tensor, Tensor]:
    """Views of the K and the V of blocks, indexed in the same way for both layouts.

    Parameters
    ----------
    blocks : [blocks, kv_heads, 2 * block_size * head_size]
    packed : bool
        See TreeCall.

    Returns
    -------
    K and V, each [blocks, kv_heads, keys / p, p, head_size / q, q]
        p keys and q head dimensions are stored together; both are 1 unless `packed`.
    """
    keys, values = blocks.split(block_size * head_size, dim=-1)
    if not packed:
        keys = keys.unflatten(-1, (head_size, 1, block_size, 1)).permute(0, 1, 4, 5, 2, 3)
        return keys, values.unflatten(-1, (block_size, 1, head_size, 1))
    keys = keys.unflatten(-1, (block_size // 16, head_size // 2, 16, 2)).permute(0, 1, 2, 4, 3, 5)
    values = values.unflatten(-1, (head_size // 16, block_size // 2, 16, 2))
    return keys, values.permute(0, 1, 3, 5, 2, 4)
