"""Latent attention (MLA) of draft trees over vLLM's paged cache of latents.

Queries are in the space of the latents: each head's has been multiplied by its part of W_UK (weight
absorption, DeepSeek-V2, section 2.1.2). So all heads share one key, the latent and its rotary part,
and one value, the latent. Implemented in Triton, and in plain PyTorch as the reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.verify.gpu.paged_attention import Impl, reference_paged_attention
from lookahead_vllm.verify.gpu.paged_batch import LatentCall, PagedBatch, PagedCall

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def latent_attention(call: LatentCall, impl: Impl = "auto") -> None:
    """Write the attention of the rows of trees to `call.output`.

    The latents of all rows must already be in the cache. A slot that no row attends to has no
    effect, NaN and inf included.

    Parameters
    ----------
    impl : {"auto", "torch", "triton"}
        "auto" is "triton" on CUDA devices and "torch" on others.
    """
    _check(call)
    if not len(call.batch) or not call.batch.max_size:
        return
    if impl == "triton" or (impl == "auto" and call.query.device.type == "cuda"):
        from lookahead_vllm.verify.gpu.triton_latents import attend

        attend(call)
    else:
        _attend_torch(call)


class DecodeRows(NamedTuple):
    """Rows of trees as requests of their own, for a kernel of decode rows.

    Each row has a new token and a context that ends with its path. The requests share the full
    blocks of the context that they have in common.
    """

    slots: Tensor
    """int64 [blocks * block_size]: the slot of the paged cache that is copied to each slot."""
    block_table: Tensor
    """int32 [n, b]: the blocks of each request."""
    lengths: Tensor
    """int32 [n]: the tokens of each request, the new one included."""


def decode_rows(batch: PagedBatch, block_table: Tensor, block_size: int) -> DecodeRows:
    """The rows of `batch` as `DecodeRows`; both are on the CPU.

    Parameters
    ----------
    batch, block_table
        As in LatentCall.
    block_size : int
        Slots of a block.
    """
    slots: list[NDArray[np.int64]] = []
    tables: list[list[int]] = []
    lengths: list[int] = []
    num_blocks = 0
    masks = batch.masks.numpy()
    for row, size, context, first in torch.stack(
        (batch.requests, batch.sizes, batch.contexts, batch.firsts), dim=1
    ).tolist():
        positions = np.arange(context + size)
        own = block_table[row].numpy()[positions // block_size].astype(np.int64) * block_size
        own += positions % block_size
        full = context // block_size
        shared = list(range(num_blocks, num_blocks + full))
        slots.append(own[: full * block_size])
        num_blocks += full
        nodes = np.arange(size)
        attended = masks[first : first + size][:, nodes // 32] >> (nodes % 32) & 1
        for path in attended.astype(np.bool_):
            rest = np.concatenate((own[full * block_size : context], own[context:][path]))
            count = -(-len(rest) // block_size)
            slots.append(np.resize(rest, count * block_size))
            tables.append([*shared, *range(num_blocks, num_blocks + count)])
            lengths.append(full * block_size + len(rest))
            num_blocks += count
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for i, table in enumerate(tables):
        padded[i, : len(table)] = table
    return DecodeRows(
        torch.from_numpy(np.concatenate(slots)),
        torch.from_numpy(padded),
        torch.tensor(lengths, dtype=torch.int32),
    )


def _check(call: LatentCall) -> None:
    query, cache, output, block_table = call[:4]
    rows, heads, width = query.shape
    is_fp8 = cache.dtype in _FP8_DTYPES
    assert query.dtype in _DTYPES and output.dtype == query.dtype, (query.dtype, output.dtype)
    assert is_fp8 or cache.dtype == query.dtype, (cache.dtype, query.dtype)
    assert is_fp8 == (call.cache_scale is not None)
    assert cache.ndim == 3 and cache.shape[2] == width, cache.shape
    assert output.shape[:2] == (rows, heads) and 0 < output.shape[2] <= width, output.shape
    assert all(tensor.stride(-1) == 1 for tensor in call[:4])
    assert block_table.dtype == torch.int32


def _attend_torch(call: LatentCall) -> None:
    """In float32, as attention with one KV head. Synchronises with the device."""
    keys = call.cache[:, :, None]
    by_rows = PagedCall(
        call.query,
        keys,
        keys[..., : call.output.shape[2]],
        call.output,
        call.block_table,
        replace(call.batch, starts=call.batch.firsts),
        call.scale,
        k_scale=call.cache_scale,
        v_scale=call.cache_scale,
    )
    for first, rows in reference_paged_attention(by_rows):
        call.output[first : first + len(rows)] = rows.to(call.output.dtype)
