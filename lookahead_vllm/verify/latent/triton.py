"""Latent attention (MLA) of draft trees over a paged cache of latents, in Triton.

All heads share the latents, so the rows of a request times the heads form tiles, and one read of a
page serves a tile. The context is split over programs (flash-decoding). Masks apply only to the
draft block at its end.
"""

import torch
import triton
import triton.language as tl

from lookahead_vllm.verify.attention.triton import (
    MAX_PARTIAL_BYTES,
    MAX_SPLITS,
    accumulate,
    ancestors_of,
    merge_splits,
    splits_for,
)
from lookahead_vllm.verify.latent import LatentCall

_LOG2E = tl.constexpr(1.4426950408889635)
BLOCK_M = 16
"""Rows times heads of a tile: sums of 512 dimensions take registers."""
BLOCK_N = 32


def attend(call: LatentCall, num_splits: int | None = None) -> None:
    """See `latent_attention`. By default, `num_splits` depends on the size of the device.

    Never waits for the device.
    """
    query, cache, output, block_table, batch = call[:5]
    rows, heads, width = query.shape
    rank = output.shape[2]
    tiles = triton.cdiv(batch.max_size * heads, BLOCK_M)
    if num_splits is None:
        num_splits = splits_for(len(batch) * tiles, batch.max_context, query.device)
        num_splits = max(1, min(num_splits, MAX_PARTIAL_BYTES // (query.numel() * 4)))
    partial = query
    if num_splits > 1:
        shape = (num_splits, rows, heads, rank + 2)
        partial = torch.empty(shape, dtype=torch.float32, device=query.device)
    has_scale = call.cache_scale is not None
    _attend_latents[(len(batch) * tiles, num_splits)](
        query, cache, output, partial, block_table,
        batch.requests, batch.sizes, batch.contexts, batch.firsts, batch.masks,
        call.cache_scale if has_scale else query,
        call.scale,
        *query.stride()[:2], *cache.stride()[:2], *output.stride()[:2],
        block_table.stride(0), batch.masks.stride(0), rows, tiles, num_splits,
        HEADS=heads,
        RANK=rank,
        ROTARY=width - rank,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_D=triton.next_power_of_2(rank),
        BLOCK_R=max(triton.next_power_of_2(width - rank), 16),
        IS_SPLIT=num_splits > 1,
        HAS_SCALE=has_scale,
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
    if num_splits > 1:
        tokens = torch.arange(rows, dtype=torch.int32, device=query.device)
        merge_splits[(rows, heads)](
            partial, output, tokens, query, query,
            *output.stride()[:2], rows, num_splits,
            HEADS=heads,
            HEAD_SIZE=rank,
            BLOCK_D=triton.next_power_of_2(rank),
            BLOCK_S=MAX_SPLITS,
            HAS_SINKS=False,
            HAS_SCALES=False,
            num_warps=8,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_row", "mask_row", "num_rows", "tiles", "num_splits"],
    do_not_specialize_on_alignment=["requests", "sizes", "contexts", "firsts", "masks"],
)
def _attend_latents(
    query, cache, output, partial, block_table,
    requests, sizes, contexts, firsts, masks, cache_scale, scale,
    query_row, query_head, cache_block, cache_slot, output_row, output_head,
    table_row, mask_row, num_rows, tiles, num_splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M rows and heads of one request over one split of its context."""
    entry = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    split = tl.program_id(1)
    size = tl.load(sizes + entry)
    if tile * BLOCK_M >= size * HEADS:
        return
    context = tl.load(contexts + entry)
    first = tl.load(firsts + entry)
    table = block_table + tl.load(requests + entry).to(tl.int64) * table_row

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = m // HEADS
    head = m % HEADS
    is_row = node < size
    row = (first + node).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    start = query + row * query_row + head * query_head
    q = tl.load(start[:, None] + d[None, :], mask=is_row[:, None] & (d < RANK)[None, :], other=0.0)
    q_rotary = tl.load(
        start[:, None] + RANK + r[None, :], mask=is_row[:, None] & (r < ROTARY)[None, :], other=0.0
    )
    factor = scale * _LOG2E
    if HAS_SCALE:
        factor = factor * tl.load(cache_scale)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # The last split also has the draft block.
    parts_each = tl.cdiv(tl.cdiv(context, BLOCK_N), num_splits)
    low = split * parts_each * BLOCK_N
    high = tl.maximum(tl.minimum(low + parts_each * BLOCK_N, context), low)
    for at in range(low, high, BLOCK_N):
        slot = at + tl.arange(0, BLOCK_N)
        is_key = slot < high
        k, k_rotary = _load(
            cache, table, slot, is_key, d, r, cache_block, cache_slot, BLOCK_SIZE, RANK, ROTARY
        )
        scores = _scores(q, q_rotary, k, k_rotary)
        scores = tl.where(is_row[:, None] & is_key[None, :], scores, float("-inf"))
        row_max, row_sum, acc = accumulate(
            scores, factor, tl.trans(k).to(q.dtype), row_max, row_sum, acc
        )
    if split == num_splits - 1:
        for at in range(0, size, BLOCK_N):
            column = at + tl.arange(0, BLOCK_N)
            is_key = column < size
            k, k_rotary = _load(
                cache, table, context + column, is_key, d, r, cache_block, cache_slot,
                BLOCK_SIZE, RANK, ROTARY,
            )  # fmt: skip
            own_masks = masks + row[:, None] * mask_row
            attends = ancestors_of(own_masks, is_row, at, size, BLOCK_M, BLOCK_N) & is_key[None, :]
            scores = tl.where(attends, _scores(q, q_rotary, k, k_rotary), float("-inf"))
            row_max, row_sum, acc = accumulate(
                scores, factor, tl.trans(k).to(q.dtype), row_max, row_sum, acc
            )

    if HAS_SCALE:
        acc = acc * tl.load(cache_scale)
    is_out = is_row[:, None] & (d < RANK)[None, :]
    if IS_SPLIT:
        begin = partial + ((split * num_rows + row) * HEADS + head) * (RANK + 2)
        tl.store(begin[:, None] + d[None, :], acc, mask=is_out)
        tl.store(begin + RANK, row_max, mask=is_row)
        tl.store(begin + RANK + 1, row_sum, mask=is_row)
    else:
        result = acc / row_sum[:, None]
        begin = output + row * output_row + head * output_head
        tl.store(begin[:, None] + d[None, :], result.to(output.dtype.element_ty), mask=is_out)


@triton.jit
def _load(
    cache, table, slot, is_key, d, r, cache_block, cache_slot,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The latents [BLOCK_D, BLOCK_N] of the slots, and their rotary parts [BLOCK_R, BLOCK_N]."""
    block = tl.load(table + slot // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    start = cache + block * cache_block + slot % BLOCK_SIZE * cache_slot
    k = tl.load(start[None, :] + d[:, None], mask=is_key[None, :] & (d < RANK)[:, None], other=0.0)
    k_rotary = tl.load(
        start[None, :] + RANK + r[:, None], mask=is_key[None, :] & (r < ROTARY)[:, None], other=0.0
    )
    return k, k_rotary


@triton.jit
def _scores(q, q_rotary, k, k_rotary):
    """float32 [BLOCK_M, BLOCK_N]: q . k."""
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    return scores + tl.dot(q_rotary, k_rotary.to(q.dtype), input_precision="ieee")
