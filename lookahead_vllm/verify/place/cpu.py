"""The rows of a step, in one compiled call for tensors on a CPU."""

import numpy as np
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.verify.place import NO_ENTRY, NO_SLOT, RequestTable, StepRows, parts_of

_NONE: Int32s = np.empty(0, np.int32)


class Placer:
    def __init__(self, table: RequestTable, rows: StepRows) -> None:
        self._read = tuple(part.numpy() for part in table[:3])
        self._rows = StepRows(*(part.numpy() for part in rows))
        self._blocks = [blocks.numpy() for blocks in table.blocks]
        self._block_sizes = table.block_sizes

    def __call__(
        self, packed: Tensor, _: int, num_filled: int, tree_lengths: Tensor | None, only: bool
    ) -> None:
        split = packed.numpy()
        if split[0] < 0:
            return
        lengths = _NONE if tree_lengths is None else tree_lengths.numpy()
        _place(split, *self._read, self._rows, num_filled, lengths, only)
        of_groups = zip(self._blocks, self._block_sizes, self._rows.slots, strict=True)
        for blocks, size, slots in of_groups:
            _map(split, len(self._rows.lengths), self._read[0], blocks, size, slots[:num_filled])


@kernel
def _place(
    packed: Int32s,
    num_computed: Int32s,
    last_sampled: Int64s,
    drafted: Int32s,
    rows: StepRows,
    num_filled: int,
    tree_lengths: Int32s,
    contexts_only: bool,
) -> None:
    ids, positions, is_padding, starts, lengths, _, row_entries, parents, places, row_depths = rows
    num_requests, num_rows = packed[0], packed[1]
    firsts, branches, entries, tokens, depths, steps = parts_of(packed, len(lengths))
    for request in range(num_requests):
        start, end = firsts[request], firsts[request + 1]
        context = num_computed[entries[request]]
        starts[request] = start
        lengths[request] = context + end - start
        if len(tree_lengths) and contexts_only:
            tree_lengths[request] = context
        elif len(tree_lengths):
            tree_lengths[request] = end - start + (0 if branches[request] else context)
        for row in range(start, end):
            unknown = tokens[row] < 0
            ids[row] = drafted[entries[request], row - start - 1] if unknown else tokens[row]
            positions[row] = context + depths[row]
            is_padding[row] = False
            row_entries[row] = entries[request]
            parents[row] = row - steps[row]
            places[row] = row - start
            row_depths[row] = depths[row]
        ids[start] = last_sampled[entries[request], 0]
    starts[num_requests:] = num_rows
    lengths[num_requests:] = 0
    tree_lengths[num_requests:] = 0
    ids[num_rows:num_filled] = 0
    positions[num_rows:num_filled] = 0
    is_padding[num_rows:num_filled] = True
    row_entries[num_rows:num_filled] = NO_ENTRY


@kernel
def _map(
    packed: Int32s,
    most_requests: int,
    num_computed: Int32s,
    blocks: Int32s,
    block_size: int,
    slots: Int64s,
) -> None:
    firsts, _, entries, _, _, _ = parts_of(packed, most_requests)
    for request in range(packed[0]):
        entry, start = entries[request], firsts[request]
        for row in range(start, firsts[request + 1]):
            at = num_computed[entry] + row - start
            slots[row] = np.int64(blocks[entry, at // block_size]) * block_size + at % block_size
    slots[packed[1] :] = NO_SLOT
