"""Tree attention over a paged KV cache on a GPU, in Triton.

The rows of a request that share a KV head form tiles, so one read of a K/V page serves all rows of
a tile. The context is split over programs (flash-decoding). Masks apply only to the draft block at
its end. The softmax is online, as in FlashAttention-2 (Dao 2023).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lookahead_vllm.verify.attention import PagedCall
from lookahead_vllm.verify.layout import paged_batch
from lookahead_vllm.verify.layout.paged_batch import PagedBatch

_LOG2E = tl.constexpr(1.4426950408889635)
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256
"""Lower bound: merging smaller splits costs more than they save."""
MAX_PARTIAL_BYTES = 256 << 20
"""Upper bound of the partial results of one launch, which limits the splits of long prompts."""
_WAVES = 2  # programs per multiprocessor to aim at by splitting the context
_PROGRAMS_WITHOUT_CONTEXT = 8
"""The most programs per multiprocessor over which the tiles of draft blocks are shared out."""
_INTERPRETED_MULTIPROCESSORS = 4


class Tile(NamedTuple):
    """The part of the scores that one program computes at a time."""

    block_m: int
    """Rows of a request that share a KV head."""
    block_n: int
    """Keys of one iteration."""
    num_warps: int
    num_stages: int


def attend(call: PagedCall, num_splits: int | None = None) -> None:
    """See `paged_attention`. By default, `num_splits` depends on the size of the device.

    Never waits for the device. The launches depend only on the shapes, `max_size` and `max_context`
    of the batch, so they can be captured in a CUDA graph over fixed buffers.
    """
    query, key_cache, value_cache, output, block_table, batch = call[:6]
    alibi_slopes, sinks, k_scale, v_scale = (
        call.alibi_slopes, call.sinks, call.k_scale, call.v_scale
    )  # fmt: skip
    _, heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    num_rows = len(batch.tokens)
    group = heads // kv_heads
    rows = batch.max_size * group
    block_m, block_n, num_warps, num_stages = tile_of(rows, query.dtype, head_size)
    if alibi_slopes is not None:  # its positions take registers
        block_n = 32
    lse = call.context_lse
    if lse is not None:  # a draft block is short
        block_m, block_n, num_stages, num_splits = min(block_m, 32), 32, 3, 1
    tiles = triton.cdiv(rows, block_m)
    if lse is not None:  # and most have far fewer rows than the longest that may come
        programs = _PROGRAMS_WITHOUT_CONTEXT * multiprocessors_of(query.device)
        tiles = min(tiles, max(programs // (len(batch) * kv_heads), 1))
    if num_splits is None:
        programs = batch.expected_requests or len(batch) * tiles
        num_splits = splits_for(programs * kv_heads, batch.max_context, query.device)
        bytes_of_a_split = 4 * num_rows * heads * (head_size + 2)
        num_splits = max(1, min(num_splits, MAX_PARTIAL_BYTES // bytes_of_a_split))
    partial = query
    if num_splits > 1:
        shape = num_splits, num_rows, heads, head_size + 2
        partial = torch.empty(shape, dtype=torch.float32, device=query.device)
    output = output.view(output.shape[0], heads, head_size)
    has_scales = k_scale is not None
    _attend_tile[(len(batch) * tiles, kv_heads, num_splits)](
        query, key_cache, value_cache, output, partial, block_table,
        batch.requests, batch.starts, batch.sizes, batch.contexts, batch.firsts, batch.places,
        batch.depths, batch.masks,
        query if alibi_slopes is None else alibi_slopes,
        query if sinks is None else sinks,
        k_scale if has_scales else query,
        v_scale if has_scales else query,
        query if lse is None else lse,
        call.scale, call.soft_cap, call.sliding_window,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *output.stride()[:2],
        block_table.stride(0), batch.masks.stride(0), num_rows, tiles, num_splits,
        0 if lse is None else lse.stride(0),
        HEADS=heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_size),
        IS_SPLIT=num_splits > 1,
        HAS_WINDOW=call.sliding_window > 0,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_CAP=call.soft_cap > 0,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=has_scales,
        HAS_CONTEXT=lse is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits[(len(batch.tokens), heads)](
            partial, output, batch.tokens,
            query if sinks is None else sinks,
            query if v_scale is None else v_scale,
            *output.stride()[:2], num_rows, num_splits,
            HEADS=heads,
            HEAD_SIZE=head_size,
            BLOCK_D=triton.next_power_of_2(head_size),
            BLOCK_S=MAX_SPLITS,
            HAS_SINKS=sinks is not None,
            HAS_SCALES=has_scales,
            num_warps=2,
        )  # fmt: skip


def tile_of(rows: int, dtype: torch.dtype, head_size: int) -> Tile:
    """The tile for a request with `rows` rows that share a KV head.

    It fits into the registers, without spills, and into the shared memory of every device since
    Ampere (99 KiB); `test_triton_compiles.py` checks both. On an H200, tiles of more rows, more
    stages or more warps are slower, up to 1.8 times for trees of few rows.
    """
    if dtype == torch.float32:
        max_block_m, block_n, num_stages = 32, 32, 3
    elif head_size > 128:
        max_block_m, block_n, num_stages = 64, 32, 3
    else:
        max_block_m, block_n, num_stages = 64, 64, 2
    block_m = min(max(triton.next_power_of_2(rows), 16), max_block_m)
    is_large = block_m * triton.next_power_of_2(head_size) >= 128 * 128
    return Tile(block_m, block_n, 8 if is_large else 4, num_stages)


def empty_batches(
    heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[PagedBatch]:
    """A batch without rows for each specialisation of the kernels that serving can need."""
    group, rows = heads // kv_heads, 16
    while rows <= tile_of(1 << 20, dtype, head_size).block_m:
        yield from paged_batch.empty_batches(max(rows // group, 1), device)
        rows *= 2


def splits_for(programs: int, max_context: int, device: torch.device) -> int:
    """Into how many parts a context is split, so that `programs` occupy the device."""
    num_splits = triton.cdiv(_WAVES * multiprocessors_of(device), max(programs, 1))
    return max(1, min(num_splits, max_context // KEYS_PER_SPLIT, MAX_SPLITS))


def multiprocessors_of(device: torch.device) -> int:
    """The multiprocessors of a device; of a CPU that stands for one, a few."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Integers and alignments that change from step to step must not trigger a compilation.
_LAYOUT = ["requests", "starts", "sizes", "contexts", "firsts", "places", "depths", "masks"]


@triton.jit(
    do_not_specialize=["table_row", "mask_row", "num_rows", "tiles", "num_splits", "lse_head"],
    do_not_specialize_on_alignment=_LAYOUT,
)
def _attend_tile(
    query, key_cache, value_cache, output, partial, block_table,
    requests, starts, sizes, contexts, firsts, places, depths, masks,
    alibi_slopes, sinks, k_scale, v_scale, context_lse,
    scale, soft_cap, window,
    query_token, query_head,
    key_block, key_slot, key_head,
    value_block, value_slot, value_head,
    output_token, output_head,
    table_row, mask_row, num_rows, tiles, num_splits, lse_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_CONTEXT: tl.constexpr,
):  # fmt: skip
    """Attention of a request's rows of one KV head over one split of its context. The rows are in
    tiles of BLOCK_M, which `tiles` programs share."""
    entry = tl.program_id(0) // tiles
    kv_head = tl.program_id(1).to(tl.int64)  # a large cache has more than 2**31 elements
    split = tl.program_id(2)
    size = tl.load(sizes + entry)
    start = tl.load(starts + entry)
    context = tl.load(contexts + entry)
    first = tl.load(firsts + entry)
    table = block_table + tl.load(requests + entry).to(tl.int64) * table_row

    for tile in range(tl.program_id(0) % tiles, tl.cdiv(size * GROUP, BLOCK_M), tiles):
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        node = m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = node < size
        d = tl.arange(0, BLOCK_D)
        is_dim = d < HEAD_SIZE
        token = (start + node).to(tl.int64)
        q = tl.load(
            query + token[:, None] * query_token + head[:, None] * query_head + d[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )
        has_mask = first + node >= node  # a vector of `first >= 0`; CAUSAL is -1
        depth = tl.load(depths + first + node, mask=is_row & has_mask, other=0)
        depth = tl.where(has_mask, depth, node)
        position = context + depth
        slope = tl.zeros([BLOCK_M], tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + head, mask=is_row, other=0.0)
        factor = scale
        if HAS_SCALES:
            factor = scale * tl.load(k_scale)

        # Without a cap and ALiBi, the exponential applies the factor.
        score_factor = 1.0
        if not (HAS_CAP or HAS_ALIBI):
            score_factor = factor * _LOG2E

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        out = output + token[:, None] * output_token + head[:, None] * output_head + d[None, :]
        is_out = is_row[:, None] & is_dim[None, :]
        rows = q, node, is_row, position
        scoring = factor, score_factor, soft_cap, slope, HAS_CAP, HAS_ALIBI
        caches = key_cache, value_cache, table, kv_head, BLOCK_SIZE
        strides = key_block, key_slot, key_head, value_block, value_slot, value_head
        pages = caches, strides, d, is_dim, HEAD_SIZE < BLOCK_D
        if HAS_CONTEXT:
            lse = tl.load(context_lse + head * lse_head + token, mask=is_row, other=float("-inf"))
            row_max = lse * _LOG2E
            row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
            acc = tl.load(out, mask=is_out, other=0.0).to(tl.float32)
        else:
            row_max, row_sum, acc = _attend_context(
                row_max, row_sum, acc, rows, scoring, pages, context, window, split, num_splits,
                BLOCK_N, HAS_WINDOW,
            )  # fmt: skip
        if split == num_splits - 1:
            end = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, size)
            row_max, row_sum, acc = _attend_own_rows(
                row_max, row_sum, acc, rows, scoring, pages, context, window, end,
                first, has_mask, depths, masks, mask_row, BLOCK_M, BLOCK_N, HAS_WINDOW,
            )  # fmt: skip

        if IS_SPLIT:
            place = (tl.load(places + entry) + node).to(tl.int64)
            row = (split * num_rows + place) * HEADS + head
            start_of_row = partial + row * (HEAD_SIZE + 2)
            tl.store(
                start_of_row[:, None] + d[None, :], acc, mask=is_row[:, None] & is_dim[None, :]
            )
            tl.store(start_of_row + HEAD_SIZE, row_max, mask=is_row)
            tl.store(start_of_row + HEAD_SIZE + 1, row_sum, mask=is_row)
        else:
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
                new_max = tl.maximum(row_max, sink)
                row_sum = row_sum * tl.exp2(row_max - new_max) + tl.exp2(sink - new_max)
                acc = acc * tl.exp2(row_max - new_max)[:, None]
            result = acc / row_sum[:, None]
            if HAS_SCALES:
                result = result * tl.load(v_scale)
            tl.store(out, result.to(output.dtype.element_ty), mask=is_out)


@triton.jit
def _attend_context(
    row_max, row_sum, acc, rows, scoring, pages, context, window, split, num_splits,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Add a split of the context, from the oldest slot in a window of the tile's rows."""
    q, _, is_row, position = rows
    score_factor = scoring[1]
    oldest = 0
    if HAS_WINDOW:
        oldest = tl.maximum(tl.min(position, axis=0) - window + 1, 0)
    parts = tl.cdiv(tl.maximum(context - oldest, 0), BLOCK_N)
    parts_each = tl.cdiv(parts, num_splits)
    low = oldest + split * parts_each * BLOCK_N
    high = tl.maximum(tl.minimum(low + parts_each * BLOCK_N, context), low)
    # First the blocks that need no mask, because every row attends to every key.
    unmasked_end = low
    if not HAS_WINDOW:
        unmasked_end = low + (high - low) // BLOCK_N * BLOCK_N
    for at in range(low, unmasked_end, BLOCK_N):
        slot = at + tl.arange(0, BLOCK_N)
        k, v = _load(pages, slot, slot >= 0, False)
        scores = _scores(q, k, scoring, slot, position)
        row_max, row_sum, acc = accumulate(
            scores, score_factor, v.to(q.dtype), row_max, row_sum, acc
        )
    for at in range(unmasked_end, high, BLOCK_N):
        slot = at + tl.arange(0, BLOCK_N)
        is_key = slot < high
        k, v = _load(pages, slot, is_key, True)
        scores = _scores(q, k, scoring, slot, position)
        attends = is_row[:, None] & is_key[None, :]
        if HAS_WINDOW:
            attends = attends & (slot[None, :] > position[:, None] - window)
        scores = tl.where(attends, scores, float("-inf"))
        row_max, row_sum, acc = accumulate(
            scores, score_factor, v.to(q.dtype), row_max, row_sum, acc
        )
    return row_max, row_sum, acc


@triton.jit
def _attend_own_rows(
    row_max, row_sum, acc, rows, scoring, pages, context, window, end,
    first, has_mask, depths, masks, mask_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the draft block, or the rows of a chain or a prompt, up to row `end` of the request."""
    q, node, is_row, position = rows
    score_factor = scoring[1]
    for at in range(0, end, BLOCK_N):
        column = at + tl.arange(0, BLOCK_N)
        is_key = column < end
        slot = context + column
        k, v = _load(pages, slot, is_key, True)
        is_masked = first + column >= column
        key_depth = tl.load(depths + first + column, mask=is_key & is_masked, other=0)
        key_position = context + tl.where(is_masked, key_depth, column)
        scores = _scores(q, k, scoring, key_position, position)
        own_masks = masks + (first + node[:, None]).to(tl.int64) * mask_row
        ancestors = ancestors_of(own_masks, is_row & has_mask, at, end, BLOCK_M, BLOCK_N)
        before = column[None, :] <= node[:, None]
        attends = tl.where(is_masked[None, :], ancestors, before)
        attends = attends & is_row[:, None] & is_key[None, :]
        if HAS_WINDOW:
            attends = attends & (key_position[None, :] > position[:, None] - window)
        scores = tl.where(attends, scores, float("-inf"))
        row_max, row_sum, acc = accumulate(
            scores, score_factor, v.to(q.dtype), row_max, row_sum, acc
        )
    return row_max, row_sum, acc


@triton.jit
def _load(pages, slot, is_key, SOME_KEYS: tl.constexpr):
    """K [BLOCK_D, BLOCK_N] and V [BLOCK_N, BLOCK_D] of the slots; 0 where `is_key` is false."""
    caches, strides, d, is_dim, SOME_DIMS = pages  # Triton 3.6 cannot read nested targets
    key_cache, value_cache, table, kv_head, BLOCK_SIZE = caches
    key_block, key_slot, key_head, value_block, value_slot, value_head = strides
    if SOME_KEYS:
        block = tl.load(table + slot // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    else:
        block = tl.load(table + slot // BLOCK_SIZE).to(tl.int64)
    inside = slot % BLOCK_SIZE
    key = key_cache + block * key_block + inside * key_slot + kv_head * key_head
    value = value_cache + block * value_block + inside * value_slot + kv_head * value_head
    if SOME_KEYS or SOME_DIMS:
        k = tl.load(key[None, :] + d[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(value[:, None] + d[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
    else:
        k = tl.load(key[None, :] + d[:, None])
        v = tl.load(value[:, None] + d[None, :])
    return k, v


@triton.jit
def _scores(q, k, scoring, key_position, position):
    """float32 [BLOCK_M, BLOCK_N]: q . k; with a cap or ALiBi the final scores, times log2(e)."""
    factor, _, soft_cap, slope, HAS_CAP, HAS_ALIBI = scoring
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if HAS_CAP or HAS_ALIBI:
        scores *= factor
        if HAS_CAP:
            # tanh, without overflow for either sign
            power = tl.exp2(tl.abs(scores) * (-2.0 * _LOG2E / soft_cap))
            bounded = soft_cap * (1.0 - power) / (1.0 + power)
            scores = tl.where(scores < 0, -bounded, bounded)
        if HAS_ALIBI:
            scores += slope[:, None] * (key_position[None, :] - position[:, None]).to(tl.float32)
        scores *= _LOG2E
    return scores


@triton.jit
def ancestors_of(masks, is_row, at, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which of the BLOCK_N rows of a tree from `at` on, up to `end`, have their bits in `masks`.

    `masks` are pointers [BLOCK_M, 1] to the first words.
    """
    word = at // 32 + tl.arange(0, BLOCK_N // 32)
    words = tl.load(
        masks + word[None, :], mask=is_row[:, None] & (word * 32 < end)[None, :], other=0
    )
    bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(bits, [BLOCK_M, BLOCK_N]) != 0


@triton.jit
def accumulate(scores, score_factor, v, row_max, row_sum, acc):
    """Add one block of keys to the running softmax in base 2 of `scores * score_factor`."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * score_factor)
    # A row without a key so far has no maximum to subtract.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * score_factor - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit(
    do_not_specialize=["num_rows", "num_splits"],
    do_not_specialize_on_alignment=["tokens"],
)
def merge_splits(
    partial, output, tokens, sinks, v_scale,
    output_token, output_head, num_rows, num_splits,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and head by their maxima and sums."""
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + place).to(tl.int64)
    head = tl.program_id(1)
    if token < 0:
        return
    split = tl.arange(0, BLOCK_S)
    is_split = split < num_splits
    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_SIZE
    start_of_row = partial + ((split * num_rows + place) * HEADS + head) * (HEAD_SIZE + 2)
    row_max = tl.load(start_of_row + HEAD_SIZE, mask=is_split, other=float("-inf"))
    row_sum = tl.load(start_of_row + HEAD_SIZE + 1, mask=is_split, other=0.0)
    acc = tl.load(
        start_of_row[:, None] + d[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )
    overall_max = tl.max(row_max, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        overall_max = tl.maximum(overall_max, sink)
    rescale = tl.exp2(row_max - overall_max)
    sum_of_all = tl.sum(row_sum * rescale, axis=0)
    if HAS_SINKS:
        sum_of_all += tl.exp2(sink - overall_max)
    result = tl.sum(acc * rescale[:, None], axis=0) / sum_of_all
    if HAS_SCALES:
        result = result * tl.load(v_scale)
    tl.store(
        output + token * output_token + head * output_head + d,
        result.to(output.dtype.element_ty),
        mask=is_dim,
    )
