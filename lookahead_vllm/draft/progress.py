"""The progress of live requests, in arrays, so that one compiled call handles a whole step."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.request_rows import RequestRows
from lookahead_vllm.draft.tree import UNKNOWN

NO_TEXT = -1
"""The text of a request that gets no drafts."""
GONE = -1
"""The row of a request that has ended."""
NOT_COUNTED = -1
"""In place of spans before `count_tokens`."""
_NO_STOP = -1
MAX_STOPS = 16
"""So many of a request's stop tokens are looked for: each token is compared with all of them, and a
request may name the whole vocabulary. What a step holds behind another one is learned, too."""

NUM_ALTERNATIVES = 4
"""A trained drafter's likeliest tokens at each depth of its chain; the first is the chain's."""
PROPOSED, GAP = range(2)
"""Columns of a chain: the token, and the class of its logit's distance, as in `recycling.py`."""


def no_chains(length: int, count: int = 0) -> Int32s:
    """Chains without tokens: int32 [count, length, NUM_ALTERNATIVES, 2]."""
    return np.full((count, length, NUM_ALTERNATIVES, 2), UNKNOWN, np.int32)


NO_CHAINS = no_chains(0)


class ProgressArrays(NamedTuple):
    """The arrays of `Progress`, a row for each request."""

    texts: Int64s
    """int64 [capacity]: the row of the request's text in the proposer, or NO_TEXT."""
    num_tokens: Int64s
    """int64 [capacity]: the known tokens of prompt and answer."""
    num_repeated: Int64s
    """int64 [capacity]: tokens that will be emitted again, because a preemption dropped their
    step."""
    remaining: Int64s
    """int64 [capacity]: tokens that may still be emitted; 0 for a request that gets no drafts."""
    is_decoding: NDArray[np.bool_]
    """bool [capacity]: whether it has emitted a token since it started, or was preempted."""
    stops: Int32s
    """int32 [capacity, MAX_STOPS]: tokens that end the request, padded with -1."""


class EmittedTokens(NamedTuple):
    """The tokens of a step, by request."""

    rows: Int64s
    """int64 [r]: the row of each request of the step, or GONE."""
    tokens: Int64s
    """int64 [r, w]"""
    counts: Int32s
    """int32 [r]: how many of its tokens each request has emitted."""
    chains: Int32s = NO_CHAINS
    """int32 [r, K, NUM_ALTERNATIVES, 2]: PROPOSED and GAP of a trained drafter for the K tokens
    after these; K is 0 without a drafter."""

    def new_spans(self) -> Int64s:
        """For `count_tokens`."""
        return np.full((len(self.rows), 2), NOT_COUNTED, np.int64)


NOTHING_EMITTED = EmittedTokens(
    np.empty(0, np.int64), np.empty((0, 1), np.int64), np.empty(0, np.int32)
)


class WantedDrafts(NamedTuple):
    """The requests that may have drafts in a step."""

    rows: Int64s
    """int64 [t]"""
    max_nodes: Int64s
    """int64 [t]"""
    may_branch: NDArray[np.bool_]
    """bool [t]"""


NOTHING_WANTED = WantedDrafts(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))


class Progress:
    """What the drafting rank knows of every live request."""

    def __init__(self) -> None:
        self._rows = RequestRows()
        capacity = self._rows.capacity
        self.arrays = ProgressArrays(
            np.full(capacity, NO_TEXT, np.int64),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.bool_),
            np.full((capacity, MAX_STOPS), _NO_STOP, np.int32),
        )

    def add(self, request_id: str, num_tokens: int) -> int:
        """The row of a new request, which gets no drafts yet."""
        row = self._rows.add(request_id)
        self.arrays = ProgressArrays(*(self._rows.resized(array) for array in self.arrays))
        self.arrays.remaining[row] = 0
        self.arrays.texts[row] = NO_TEXT
        self.arrays.num_repeated[row] = 0
        self.resume(row, num_tokens)
        return row

    def resume(self, row: int, num_tokens: int) -> None:
        """The request starts, with so many tokens of prompt and answer."""
        self.arrays.num_tokens[row], self.arrays.is_decoding[row] = num_tokens, False

    def follow(self, row: int, text: int, remaining: int, stops: Iterable[int | None]) -> None:
        """The request gets drafts from now on, until it has emitted `remaining` tokens, or one of
        the first MAX_STOPS `stops`.
        """
        ends = [token for token in stops if token is not None][:MAX_STOPS]
        self.arrays.texts[row], self.arrays.remaining[row] = text, remaining
        self.arrays.stops[row] = _NO_STOP
        self.arrays.stops[row, : len(ends)] = ends

    def pop(self, request_id: str) -> None:
        """Release the row of a request that has ended."""
        self._rows.pop(request_id)


@borrowing_kernel
def _is_stop(stops: Int32s, token: int) -> bool:
    found = False
    for stop in stops:
        found |= stop == token
    return found


@kernel
def count_tokens(progress: ProgressArrays, emitted: EmittedTokens, spans: Int64s) -> None:
    """Count the tokens of a step, once.

    Fills `spans` int64 [r, 2]: for each request, the first of its tokens that drafts have not seen,
    and the end of those that belong to its answer: it ends with a stop token, or with the last
    token allowed. Does nothing if they are filled already.
    """
    progress, emitted = ProgressArrays(*progress), EmittedTokens(*emitted)
    if len(spans) and spans[0, 0] != NOT_COUNTED:
        return
    spans[:] = 0
    for i, row in enumerate(emitted.rows):
        count = np.int64(emitted.counts[i])
        if row == GONE or count == 0:  # it still reads its prompt
            continue
        progress.num_tokens[row] += count
        progress.is_decoding[row] = True
        first = min(progress.num_repeated[row], count)
        progress.num_repeated[row] -= first
        end = min(count, first + progress.remaining[row])
        progress.remaining[row] -= end - first
        for at in range(first, end):
            if _is_stop(progress.stops[row], emitted.tokens[i, at]):
                end = at + 1
                progress.remaining[row] = 0
                break
        spans[i, 0], spans[i, 1] = first, end


def compile_progress() -> None:
    """Compile the kernels, so that no request waits for the compiler."""
    arrays = Progress().arrays[:]
    count_tokens(arrays, NOTHING_EMITTED[:], NOTHING_EMITTED.new_spans())
    limit_trees(arrays, NOTHING_WANTED[:], 1)


@kernel
def limit_trees(progress: ProgressArrays, wanted: WantedDrafts, max_model_len: int) -> Int64s:
    """The limits of the trees of a step: int64 [t, 4], as `growers.grow_all` takes them.

    A request that can have no draft has 0 nodes. Nodes take the KV slots after the known tokens,
    and a tree of depth d emits up to d + 1 tokens; both stay within the request's limits.
    """
    progress, wanted = ProgressArrays(*progress), WantedDrafts(*wanted)
    trees = np.zeros((len(wanted.rows), 4), np.int64)
    for i, row in enumerate(wanted.rows):
        # The proposer is ahead of a request that repeats tokens.
        if progress.texts[row] == NO_TEXT or progress.num_repeated[row]:
            continue
        nodes = min(wanted.max_nodes[i], max_model_len - progress.num_tokens[row] - 1)
        depth = min(nodes, progress.remaining[row] - 1)
        if depth > 0:
            trees[i, 0], trees[i, 1] = progress.texts[row], nodes
            trees[i, 2], trees[i, 3] = depth, wanted.may_branch[i]
    return trees
