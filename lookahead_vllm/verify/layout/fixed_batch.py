"""Buffers for the trees of a step that a captured CUDA graph runs."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.verify.layout.paged_batch import CAUSAL, PagedBatch
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from lookahead_vllm.verify.place import Split, pack, parts_of
from lookahead_vllm.verify.transfer import staged

ROWS_OF_A_TREE = 8
"""The expected tokens of a step for each of its trees; determines how a context is split."""

NO_STARTS: Int32s = np.zeros(1, np.int32)
"""Of a step without requests."""

_MIN_ROWS = 3  # of a branching tree: the root and two children


class _Room(NamedTuple):
    """What fits into the buffers."""

    entries: int
    num_tokens: int
    words: int
    """Of a mask."""
    max_size: int
    max_context: int
    holds_all: bool
    """Whether each request of a step has an entry, those without a tree included."""


class FixedBatch:
    """A `PagedBatch` of branching trees whose tensors never move.

    All tensors are parts of one, so a step fills them in one copy, from host memory that never
    moves either: a captured graph may contain the copy. Entries without a tree have size 0, rows
    without a tree token -1. There is room for every step of the graph's `num_tokens` tokens.

    Parameters
    ----------
    max_size : int
        The most rows of a tree, its root included.
    contexts : int32 [at least max_requests], optional
        On the device. With it, the batch has all requests of a step, in order, and reads the
        contexts there; those without a branching tree are causal.
    """

    def __init__(
        self,
        num_tokens: int,
        max_requests: int,
        max_size: int,
        max_context: int,
        device: torch.device | str,
        contexts: torch.Tensor | None = None,
    ) -> None:
        self.holds_all = holds_all = contexts is not None
        """Whether the batch has all requests."""
        entries = min(max_requests, num_tokens if holds_all else num_tokens // _MIN_ROWS)
        max_size = min(max_size, num_tokens)
        words = (max_size + 31) // 32
        lengths = [*[entries] * 5, num_tokens, num_tokens * words, num_tokens]
        size = sum(lengths)
        self._host = staged(torch.zeros(size, dtype=torch.int32), device)
        """What `upload` copies: written again only when the device has read it, see `LateShape`."""
        self._on_host: Int32s = self._host.numpy()
        self._packed = torch.empty(size, dtype=torch.int32, device=device)
        parts = self._packed.split(lengths)
        requests, starts, sizes, own_contexts, firsts, depths, masks, tokens = parts
        self.batch = PagedBatch(
            requests,
            starts,
            sizes,
            own_contexts if contexts is None else contexts[:entries],
            firsts,
            firsts,  # all requests have trees; not read with contexts of others
            depths,
            masks.view(num_tokens, words),
            tokens,
            max_size,
            max_context,
            max(1, min(entries, num_tokens // ROWS_OF_A_TREE)),
        )
        self._room = _Room(entries, num_tokens, words, max_size, max_context, holds_all)
        self.num_trees = 0
        """The branching trees of the step. Without `contexts`, they are the first entries."""
        none, no_rows = np.empty(0, np.int64), np.zeros(Split.size(0, 0), np.int32)
        self.write(Split(no_rows, 0), DraftForest.of([]), none, none, none)  # compiled now
        self.fill(None)

    def fill(self, trees: TreeBatch | None, starts: Int32s = NO_STARTS) -> None:
        """Write all branching trees of a step, in one asynchronous copy.

        Its source is a copy of what is on the host: of steps that do not wait for each other, as in
        a pipeline, the next one may be filled in before the device has read this one.

        `starts` is as in `write`, and read if the batch `holds_all`. Raises ValueError if the trees
        do not fit.
        """
        none = np.empty(0, np.int64)
        forest, requests, roots, contexts = DraftForest.of([]), none, none, none
        if trees is not None:
            forest, columns = trees.forest, (trees.requests, trees.starts, trees.contexts)
            requests, roots, contexts = (column.long().numpy() for column in columns)
        chosen = np.ones(len(requests), np.bool_)
        nodes = forest.parents, forest.depths, forest.firsts
        rows = requests, starts, roots, contexts
        self._note(_write(self._on_host, self._room, *nodes, chosen, *rows))
        self._packed.copy_(staged(self._on_host.copy(), self._packed.device), non_blocking=True)

    def write(
        self,
        split: Split,
        forest: DraftForest,
        requests: Int64s,
        entries: Int64s,
        contexts: Int64s,
    ) -> None:
        """As `split.write`, and write the branching ones of the trees on the host; `upload` copies
        them. `contexts`, int64 [t], is as in TreeBatch."""
        nodes = forest.tokens, forest.parents, forest.depths, forest.firsts
        rows = requests, entries, split.packed, split.most_requests, contexts
        self._note(_share_out_and_write(self._on_host, self._room, *nodes, *rows))

    def _note(self, num_trees: int) -> None:
        if num_trees < 0:
            raise ValueError(f"the trees of a step do not fit into buffers for {self._room}")
        self.num_trees = num_trees

    def upload(self) -> None:
        """Copy what was written on the host, asynchronously."""
        self._packed.copy_(self._host, non_blocking=True)


@kernel
def _share_out_and_write(
    packed: Int32s,
    room: _Room,
    tokens: Int32s,
    parents: Int32s,
    depths: Int32s,
    firsts: Int64s,
    requests: Int64s,
    entries: Int64s,
    split: Int32s,
    most_requests: int,
    contexts: Int64s,
) -> int:
    """One call, because the device waits for it: `pack`, then `_write`."""
    pack(tokens, parents, depths, firsts, requests, entries, split, most_requests)
    starts, branches = parts_of(split, most_requests)[:2]
    starts, branching = starts[: len(entries) + 1], branches[requests].astype(np.bool_)
    roots = starts[requests].astype(np.int64)
    return _write(
        packed, room, parents, depths, firsts, branching, requests, starts, roots, contexts
    )


@kernel
def _write(
    packed: Int32s,
    room: _Room,
    parents: Int32s,
    depths: Int32s,
    firsts: Int64s,
    chosen: NDArray[np.bool_],
    requests: Int64s,
    starts: Int32s,
    roots: Int64s,
    contexts: Int64s,
) -> int:
    """Lay out the chosen ones of t trees, whose first rows are `roots`, int64 [t].

    `packed` is int32 [5 * entries + (2 + words) * num_tokens]. Returns the number of trees, or -1
    if they do not fit.
    """
    entries, num_tokens, words, max_size, max_context, holds_all = room
    if not _begin(packed, room, starts):
        return -1
    row_depths = packed[5 * entries :]
    masks, tokens = row_depths[num_tokens:], row_depths[(1 + words) * num_tokens :]
    num_trees = row = 0
    for tree in range(len(chosen)):
        if not chosen[tree]:
            continue
        first, size, request = firsts[tree], firsts[tree + 1] - firsts[tree] + 1, requests[tree]
        entry, start = request if holds_all else num_trees, roots[tree]
        if entry >= entries or row + size > num_tokens:
            return -1
        if size > max_size or contexts[tree] > max_context:
            return -1
        packed[entry], packed[entries + entry] = request, start
        packed[2 * entries + entry], packed[3 * entries + entry] = size, contexts[tree]
        packed[4 * entries + entry] = row
        masks[row * words], tokens[row] = 1, start
        for place in range(1, size):
            own, parent = row + place, row + 1 + parents[first + place - 1]
            row_depths[own], tokens[own] = depths[first + place - 1], start + place
            for word in range(words):
                masks[own * words + word] = masks[parent * words + word]
            masks[own * words + place // 32] |= np.int32(np.int64(1) << (place % 32))
        num_trees, row = num_trees + 1, row + size
    return num_trees


@kernel
def _begin(packed: Int32s, room: _Room, starts: Int32s) -> bool:
    """Write a step without trees; False if its requests do not fit."""
    entries, num_tokens, words, max_size, _, holds_all = room
    packed[:] = 0
    packed[5 * entries + (1 + words) * num_tokens :] = -1
    if not holds_all:
        return True
    if len(starts) - 1 > entries:
        return False
    packed[4 * entries : 5 * entries] = CAUSAL
    for request in range(len(starts) - 1):
        size = starts[request + 1] - starts[request]
        if size > max_size:
            return False
        packed[request], packed[entries + request] = request, starts[request]
        packed[2 * entries + request] = size
    return True
