"""Latent attention (MLA) of draft trees over vLLM's paged cache of latents.

Queries are in the space of the latents: each head's has been multiplied by its part of W_UK (weight
absorption, DeepSeek-V2, section 2.1.2). So all heads share one key, the latent and its rotary part,
and one value, the latent. Implemented in Triton, and in plain PyTorch as the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.verify.gpu.paged_attention import Impl
from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
from lookahead_vllm.verify.reference_attention import reference_attention

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class LatentCall(NamedTuple):
    """The checked arguments of `latent_attention`."""

    query: Tensor
    cache: Tensor
    output: Tensor
    block_table: Tensor
    batch: PagedBatch
    scale: float
    cache_scale: Tensor | None


def latent_attention(
    query: Tensor,
    cache: Tensor,
    output: Tensor,
    block_table: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    cache_scale: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Write the attention of the rows of trees to `output`.

    The latents of all rows must already be in the cache. A slot that no row attends to has no
    effect, NaN and inf included.

    Parameters
    ----------
    query : float32, bfloat16 or float16 [n, heads, rank + rotary]
        Only the rows of the trees, one tree after the other; n = sum(sizes).
    cache : [num_blocks, block_size, rank + rotary]
        The query's dtype, or fp8 with `cache_scale`. Contiguous in the last dimension.
    output : [n, heads, rank]
        The query's dtype; written in place.
    block_table : int32 [num_reqs, max_blocks]
        Slot p of a request is in block `block_table[row, p // block_size]`.
    batch : PagedBatch
        Only trees, on the query's device. `starts` and `tokens` are not read.
    scale : float
        Factor of q . k.
    cache_scale : float32 [1], optional
        Factor of an fp8 cache's latents, on the query's device.
    impl : {"auto", "torch", "triton"}
        "auto" is "triton" on CUDA devices and "torch" on others.

    Raises
    ------
    ValueError
        Shapes or dtypes that do not fit.
    """
    call = LatentCall(query, cache, output, block_table, batch, scale, cache_scale)
    _check(call)
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"impl is {impl!r}; choose 'auto', 'torch' or 'triton'")
    if not len(batch) or not batch.max_size:
        return
    if impl == "triton" or (impl == "auto" and query.device.type == "cuda"):
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
        As in `latent_attention`.
    block_size : int
        Slots of a block.
    """
    slots: list[NDArray[np.int64]] = []
    tables: list[list[int]] = []
    lengths: list[int] = []
    num_blocks = 0
    masks = batch.masks.numpy()
    for row, size, context, first in torch.stack(
        (batch.rows, batch.sizes, batch.contexts, batch.firsts), dim=1
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
    if query.dtype not in _DTYPES or output.dtype != query.dtype:
        raise ValueError(
            "query and output share float32, bfloat16 or float16; got "
            f"{query.dtype}, {output.dtype}"
        )
    is_fp8 = cache.dtype in _FP8_DTYPES
    if (cache.dtype != query.dtype and not is_fp8) or is_fp8 != (call.cache_scale is not None):
        raise ValueError(
            f"the cache holds {cache.dtype}; it holds the query's {query.dtype}, or fp8 with a "
            "cache_scale"
        )
    rows, heads, width = query.shape
    if cache.ndim != 3 or cache.shape[2] != width:
        raise ValueError(
            f"the cache is [num_blocks, block_size, {width}] for this query; got "
            f"{list(cache.shape)}"
        )
    if output.shape[:2] != (rows, heads) or not 0 < output.shape[2] <= width:
        raise ValueError(f"output is {list(output.shape)} for a query of {list(query.shape)}")
    if any(tensor.stride(-1) != 1 for tensor in (query, cache, output, block_table)):
        raise ValueError("all tensors are contiguous in their last dimension")
    if block_table.dtype != torch.int32:
        raise ValueError(f"block_table is int32, not {block_table.dtype}")


def _attend_torch(call: LatentCall) -> None:
    """In float32. Synchronises with the device."""
    query, cache, output, block_table, batch = call[:5]
    block_size, device = cache.shape[1], query.device
    for row, size, context, first in torch.stack(
        (batch.rows, batch.sizes, batch.contexts, batch.firsts), dim=1
    ).tolist():
        if not size:
            continue
        slots = torch.arange(context + size, device=device)
        blocks = block_table[row, slots // block_size].long()
        latents = cache[blocks, slots % block_size].float()[None]
        if call.cache_scale is not None:
            latents *= call.cache_scale
        nodes = torch.arange(size, device=device)
        words = batch.masks[first : first + size][:, nodes // 32]
        allowed = torch.ones(size, context + size, dtype=torch.bool, device=device)
        allowed[:, context:] = (words >> (nodes % 32) & 1).bool()
        output[first : first + size] = reference_attention(
            query[first : first + size],
            latents,
            latents[..., : output.shape[2]],
            allowed,
            slots.expand(size, -1),
            scale=call.scale,
            sliding_window=-1,
            alibi_slopes=None,
            soft_cap=0.0,
            sinks=None,
        ).to(output.dtype)
