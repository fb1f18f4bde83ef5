"""The rows of a step, written into the buffers that its forward pass reads, in one launch.

vLLM prepares a step before it is known how many rows each request gets. All that depends on this is
data on the device, and is written here: tokens, positions, starts, lengths and KV slots.
"""

from typing import NamedTuple

from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.verify.devices import module_for

NO_SLOT = -1
"""The KV slot of a row that belongs to no request."""

NO_ENTRY = -1
"""The entry of such a row, for which vLLM's sampler draws nothing."""

NOT_SPLIT = -1
"""In place of the number of requests, if there are no rows to place."""


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
    entries: Tensor
    """int64 [t]: the entry of each row's request in the table."""
    parents: Tensor
    """int32 [t]: the row of each row's parent; a root's is its own. This and the rest are not
    written for padding."""
    places: Tensor
    """int32 [t]: how many rows each row is after its root's."""
    depths: Tensor
    """int32 [t]: the depth of each row in its tree, 0 at the root."""


class RequestTable(NamedTuple):
    """What the device knows of every request, by its entry, of m."""

    num_computed: Tensor
    """int32 [m]: tokens before its root."""
    last_sampled: Tensor
    """int64 [m, 1]: the token of its root."""
    drafted: Tensor
    """int32 [m, k]: what a trained drafter proposes after its root, for rows of chains whose token
    is UNKNOWN on the host."""
    blocks: tuple[Tensor, ...]
    """int32 [m, b] each: its KV blocks, in each of g groups of layers."""
    block_sizes: tuple[int, ...]
    """The tokens of a block of each group."""


class Split(NamedTuple):
    """How the rows of a step are shared out to its requests, in one array for the device.

    Its parts have fixed places, so that a captured graph can read them.
    """

    packed: Int32s
    """int32 [3 + 3 * m + 3 * t], with room for m requests and t rows: the number of requests r and
    of rows n; the first row of each request, then n; whether its tree branches; its entry in the
    table; the token of each row, 0 at roots, UNKNOWN if the table has it; its depth; how many rows
    its parent is before it."""
    most_requests: int
    """m."""

    @staticmethod
    def size(most_requests: int, most_rows: int) -> int:
        """The length of `packed`."""
        return 3 + 3 * (most_requests + most_rows)

    def write(self, forest: DraftForest, requests: Int64s, entries: Int64s) -> None:
        """One row for each root and each node of t trees.

        `requests`, int64 [t], is each tree's request, from 0 to r - 1; none occurs twice.
        `entries`, int64 [r], is the entry of each request in the table.
        """
        nodes = forest.tokens, forest.parents, forest.depths, forest.firsts
        pack(*nodes, requests, entries, self.packed, self.most_requests)

    def clear(self) -> None:
        """The rows of the next step are written in another way: `place` leaves them alone."""
        self.packed[0] = NOT_SPLIT

    @property
    def num_requests(self) -> int:
        """r."""
        return int(self.packed[0])

    @property
    def num_rows(self) -> int:
        """n."""
        return int(self.packed[1])

    @property
    def starts(self) -> Int32s:
        """int32 [r + 1]: the first row of each request, then n."""
        return self.packed[2 : 3 + self.num_requests]


@kernel
def parts_of(
    packed: Int32s, most_requests: int
) -> tuple[Int32s, Int32s, Int32s, Int32s, Int32s, Int32s]:
    """Views of `Split.packed`: starts, branches, entries, tokens, depths, steps to the parent."""
    m, t = most_requests, len(packed) // 3 - 1 - most_requests
    starts, requests, rows = packed[2 : 3 + m], packed[3 + m :], packed[3 + 3 * m :]
    return starts, requests[:m], requests[m : 2 * m], rows[:t], rows[t : 2 * t], rows[2 * t :]


@kernel
def pack(
    tokens: Int32s,
    parents: Int32s,
    depths: Int32s,
    firsts: Int64s,
    requests: Int64s,
    entries: Int64s,
    packed: Int32s,
    most_requests: int,
) -> None:
    """Write a step to `Split.packed`, as `Split.write`."""
    starts, branches, own_entries, ids, row_depths, steps = parts_of(packed, most_requests)
    num_requests = len(entries)
    num_rows = num_requests + firsts[-1]
    packed[0], packed[1] = num_requests, num_rows
    own_entries[:num_requests] = entries
    starts[: num_requests + 1], branches[:num_requests] = 0, 0
    ids[:num_rows], row_depths[:num_rows], steps[:num_rows] = 0, 0, 0
    for tree in range(len(requests)):
        starts[requests[tree] + 1] = firsts[tree + 1] - firsts[tree]
    for request in range(num_requests):
        starts[request + 1] += starts[request] + 1
    for tree in range(len(requests)):
        row, first = starts[requests[tree]] + 1, firsts[tree]
        for place in range(firsts[tree + 1] - first):
            ids[row + place] = tokens[first + place]
            row_depths[row + place] = depths[first + place]
            steps[row + place] = place - parents[first + place]
            if parents[first + place] != place - 1:
                branches[requests[tree]] = 1


class Placer:
    """Writes the rows of steps to `rows`, from what it reads in `table`; keeps their addresses."""

    def __init__(self, table: RequestTable, rows: StepRows) -> None:
        self._place = module_for("place", rows.ids.device).Placer(table, rows)

    def place(
        self,
        packed: Tensor,
        most_requests: int,
        num_filled: int,
        tree_lengths: Tensor | None = None,
        contexts_only: bool = False,
    ) -> None:
        """Write the rows of a step, and padding after them; nothing if there is no `Split`.

        Rows of padding have token and position 0, and neither a KV slot nor an entry. All starts
        and lengths are written. A captured graph may repeat the call for other steps.

        Parameters
        ----------
        packed : int32
            As in `Split`, where the device can read it. It has room for as many requests and rows
            as the buffers of the step.
        most_requests, num_filled
            At least the requests r, and the rows to write, at least n.
        tree_lengths : int32 [m], optional
            Written like the lengths, except that a request whose tree branches has only its rows.
        contexts_only
            `tree_lengths` has the tokens before each request's root instead.
        """
        self._place(packed, most_requests, num_filled, tree_lengths, contexts_only)
