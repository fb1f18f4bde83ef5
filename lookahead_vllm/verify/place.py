"""The rows of a step, written into the buffers that its forward pass reads, in one launch.

vLLM prepares a step before it is known how many rows each request gets. All that depends on this is
data on the device, and is written here: tokens, positions, starts, lengths and KV slots.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest

NO_SLOT = -1
"""The KV slot of a row that belongs to no request."""


class StepRows(NamedTuple):
    """The buffers of a step, for at most t rows and m requests, on one device."""

    ids: Tensor
    """int32 [t]: the token of each row."""
    positions: Tensor
    """int64 [t]: the position of each row, which grows with its depth in the tree."""
    is_padding: Tensor
    """bool [t]: whether a row belongs to no request."""
    starts: Tensor
    """int32 [m + 1]: the first row of each request; the number of rows from the last one on."""
    lengths: Tensor
    """int32 [m]: tokens before a request's root, plus its rows; 0 without rows."""
    slots: Tensor
    """int64 [g, t]: the KV slot of each row, in each of g groups of layers. Slots follow the order
    of the rows."""


class RequestTable(NamedTuple):
    """What the device knows of every request, by its entry, of m."""

    num_computed: Tensor
    """int32 [m]: tokens before its root."""
    last_sampled: Tensor
    """int64 [m, 1]: the token of its root."""
    blocks: tuple[Tensor, ...]
    """int32 [m, b] each: its KV blocks, in each of g groups of layers."""
    block_sizes: tuple[int, ...]
    """The tokens of a block of each group."""


class Split(NamedTuple):
    """How the n rows of a step are shared out to its r requests, in one array for the device."""

    packed: Int32s
    """int32 [2 * r + 1 + 2 * n]: the first row of each request, then n; whether its tree branches;
    the token of each row, 0 at roots; its depth."""
    num_requests: int
    num_rows: int

    @classmethod
    def of(
        cls, forest: DraftForest, rows: Int64s, num_requests: int, memory: Int32s | None = None
    ) -> Split:
        """One row for each root and each node.

        Parameters
        ----------
        forest
            t trees.
        rows : int64 [t]
            Each tree's request, from 0 to `num_requests` - 1; none occurs twice.
        memory : int32 [at least `size`], optional
            Where `packed` is written.
        """
        num_rows = num_requests + forest.num_nodes
        size = cls.size(num_requests, num_rows)
        packed = np.empty(size, np.int32) if memory is None else memory[:size]
        _pack(
            forest.tokens, forest.parents, forest.depths, forest.firsts, rows, num_requests, packed
        )
        return cls(packed, num_requests, num_rows)

    @staticmethod
    def size(num_requests: int, num_rows: int) -> int:
        """The length of `packed`."""
        return 2 * num_requests + 1 + 2 * num_rows

    @property
    def starts(self) -> Int32s:
        """int32 [r + 1]: the first row of each request, then n."""
        return self.packed[: self.num_requests + 1]


@kernel
def _pack(
    tokens: Int32s,
    parents: Int32s,
    depths: Int32s,
    firsts: Int64s,
    rows: Int64s,
    num_requests: int,
    packed: Int32s,
) -> None:
    num_rows = num_requests + firsts[-1]
    packed[:] = 0
    starts, branches = packed[: num_requests + 1], packed[num_requests + 1 : 2 * num_requests + 1]
    ids = packed[2 * num_requests + 1 : 2 * num_requests + 1 + num_rows]
    row_depths = packed[2 * num_requests + 1 + num_rows :]
    for tree in range(len(rows)):
        starts[rows[tree] + 1] = firsts[tree + 1] - firsts[tree]
    for request in range(num_requests):
        starts[request + 1] += starts[request] + 1
    for tree in range(len(rows)):
        row, first = starts[rows[tree]] + 1, firsts[tree]
        for place in range(firsts[tree + 1] - first):
            ids[row + place] = tokens[first + place]
            row_depths[row + place] = depths[first + place]
            if parents[first + place] != place - 1:
                branches[rows[tree]] = 1


class Placer(Protocol):
    """Writes the rows of steps, on one device."""

    def place(
        self,
        packed: Tensor,
        num_requests: int,
        num_rows: int,
        entries: Tensor,
        num_filled: int,
        tree_lengths: Tensor | None = None,
    ) -> None:
        """Write the rows of a step, and padding after them.

        Rows of padding have token and position 0 and no KV slot, and belong to no request. All
        starts and lengths are written.

        Parameters
        ----------
        packed : int32 [2 * r + 1 + 2 * n]
            As in `Split`, where the device can read it.
        num_requests, num_rows
            r and n.
        entries : int64 [r]
            The entry of each request in the table.
        num_filled
            The rows to write, at least n.
        tree_lengths : int32 [at least r], optional
            Written like the lengths, except that a request whose tree branches has only its rows.
        """


def placer(table: RequestTable, rows: StepRows) -> Placer:
    """Writes to `rows` what it reads from `table`; keeps their addresses."""
    if rows.ids.device.type == "cpu":
        from lookahead_vllm.verify.cpu.place import CPUPlacer

        return CPUPlacer(table, rows)
    from lookahead_vllm.verify.gpu.triton_place import TritonPlacer

    return TritonPlacer(table, rows)
