"""The rows of a step, in one asynchronous launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lookahead_vllm.verify.place import RequestTable, StepRows

_BLOCK = 64
_COUNTS = ["room_for_requests", "room_for_rows", "num_filled", "slots_stride", "drafted_stride"]
_BUFFERS = [
    *("packed", "drafted", "ids", "positions", "is_padding", "starts", "lengths", "slots"),
    *("row_entries", "parents", "places", "depths"),
]


class Placer:
    def __init__(self, table: RequestTable, rows: StepRows) -> None:
        self._table, self._rows = table, rows
        device, blocks = rows.ids.device, table.blocks
        pointers = [own.data_ptr() for own in blocks]
        self._addresses = (
            torch.tensor(pointers, dtype=torch.uint64, device=device),
            torch.tensor([own.stride(0) for own in blocks], dtype=torch.int64, device=device),
            torch.tensor(table.block_sizes, dtype=torch.int32, device=device),
        )

    def __call__(
        self,
        packed: Tensor,
        most_requests: int,
        num_filled: int,
        tree_lengths: Tensor | None,
        contexts_only: bool,
    ) -> None:
        table, rows = self._table, self._rows
        _place[(most_requests + 1,)](
            packed, *table[:3], *self._addresses, *rows, table.drafted.stride(0),
            rows.slots.stride(0), rows.lengths if tree_lengths is None else tree_lengths,
            len(rows.lengths), len(rows.ids), num_filled,
            GROUPS=len(rows.slots), HAS_TREES=tree_lengths is not None,
            CONTEXTS_ONLY=contexts_only, BLOCK=_BLOCK, num_warps=2,
        )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_BUFFERS)
def _place(
    packed, num_computed, last_sampled, drafted, blocks, block_strides, block_sizes,
    ids, positions, is_padding, starts, lengths, slots, row_entries, parents, places, depths,
    drafted_stride, slots_stride, tree_lengths,
    room_for_requests, room_for_rows, num_filled,
    GROUPS: tl.constexpr, HAS_TREES: tl.constexpr, CONTEXTS_ONLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each request that there may be, and one for the padding."""
    request = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    num_requests, num_rows = tl.load(packed), tl.load(packed + 1)
    if request == tl.num_programs(0) - 1:
        if num_requests >= 0:
            for first in range(num_rows, num_filled, BLOCK):
                row = first + offset
                is_row = row < num_filled
                tl.store(ids + row, 0, mask=is_row)
                tl.store(positions + row, 0, mask=is_row)
                tl.store(is_padding + row, 1, mask=is_row)
                tl.store(row_entries + row, -1, mask=is_row)
                for group in tl.static_range(GROUPS):
                    tl.store(slots + group * slots_stride + row, -1, mask=is_row)
            for first in range(num_requests, room_for_requests + 1, BLOCK):
                at = first + offset
                tl.store(starts + at, num_rows, mask=at <= room_for_requests)
                tl.store(lengths + at, 0, mask=at < room_for_requests)
                if HAS_TREES:
                    tl.store(tree_lengths + at, 0, mask=at < room_for_requests)
        return
    if request >= num_requests:
        return

    firsts = packed + 2
    branching = firsts + room_for_requests + 1
    entries = branching + room_for_requests
    tokens = entries + room_for_requests
    start, end = tl.load(firsts + request), tl.load(firsts + request + 1)
    entry = tl.load(entries + request).to(tl.int64)
    context = tl.load(num_computed + entry)
    tl.store(starts + request, start)
    tl.store(lengths + request, context + end - start)
    if HAS_TREES:
        length = context
        if not CONTEXTS_ONLY:
            branches = tl.load(branching + request)
            length = end - start + tl.where(branches != 0, 0, context)
        tl.store(tree_lengths + request, length)
    root = tl.load(last_sampled + entry).to(tl.int32)
    for first in range(start, end, BLOCK):
        row = first + offset
        is_row = row < end
        token = tl.load(tokens + row, mask=is_row, other=0)
        own = drafted + entry * drafted_stride + row - start - 1
        token = tl.where(token < 0, tl.load(own, mask=is_row & (token < 0), other=0), token)
        depth = tl.load(tokens + room_for_rows + row, mask=is_row, other=0)
        step = tl.load(tokens + 2 * room_for_rows + row, mask=is_row, other=0)
        tl.store(ids + row, tl.where(row == start, root, token), mask=is_row)
        tl.store(positions + row, (context + depth).to(tl.int64), mask=is_row)
        tl.store(is_padding + row, 0, mask=is_row)
        tl.store(row_entries + row, entry, mask=is_row)
        tl.store(parents + row, row - step, mask=is_row)
        tl.store(places + row, row - start, mask=is_row)
        tl.store(depths + row, depth, mask=is_row)
        at = context + row - start
        for group in tl.static_range(GROUPS):
            own = tl.load(blocks + group).to(tl.pointer_type(tl.int32))
            own += entry * tl.load(block_strides + group)
            size = tl.load(block_sizes + group)
            block = tl.load(own + at // size, mask=is_row, other=0).to(tl.int64)
            tl.store(slots + group * slots_stride + row, block * size + at % size, mask=is_row)
