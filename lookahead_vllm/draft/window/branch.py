"""The lookahead branch of a step: whose combs are sent, and whether they earn what they cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead_vllm.draft.budget.allot import PROBE_AFTER_STEPS
from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.options import SHIFTS, LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits, RequestOverrides, Verified
from lookahead_vllm.draft.sources import WINDOW
from lookahead_vllm.draft.tree import UNKNOWN, DraftForest
from lookahead_vllm.draft.window.grid import SHIFT_HITS, SHIFT_LEVELS, SHIFT_ONE, Windows
from lookahead_vllm.draft.window.shape import WindowShape

_SHIFTS = dict(zip(SHIFTS, (SHIFT_ONE, SHIFT_HITS, SHIFT_LEVELS), strict=True))

COMB_PROB = 0.0005
"""Of a node that only the comb sends: it is there to be learned from."""

PRIOR = 0.3  # tokens a step that a window is believed to bring a request until it was tried,
MEMORY = 100  # after about so many tries,
FORGET = 2000  # and again after about so many steps without
NO_REQUEST = -1


class LookaheadBranch:
    """The windows of all requests, and what they were worth so far.

    A window's n-grams become output in later steps. So what a comb is worth is counted: the
    accepted nodes that the windows' n-grams brought, for each comb sent. With a measured cost of
    a step, combs are sent in the steps in which that is more than they cost; all or none.
    """

    def __init__(self, options: LookaheadOptions) -> None:
        self.windows = Windows(options.window)
        self.worth = PRIOR
        self._shift = _SHIFTS[options.window_shift]
        capacity = self.windows.request_rows.capacity
        self._sent = np.zeros(capacity, np.bool_)
        """The comb is on its way, or was lost there."""
        self._stale = np.zeros(capacity, np.bool_)
        """A step went by without the comb, so that the window fits the text no more."""

    def start(self, request_id: str, prompt: Int32s, shape: WindowShape) -> None:
        """A request begins; W = 0 is one without a window."""
        prompt = prompt[prompt != UNKNOWN]
        if shape.window_size == 0 or len(prompt) == 0:
            return
        self.windows.start(request_id, prompt, shape)
        self._sent = self.windows.request_rows.widened(self._sent)
        self._stale = self.windows.request_rows.widened(self._stale)
        number = self.windows.request_rows.numbers([request_id])
        self._sent[number] = self._stale[number] = False

    def finish(self, request_id: str) -> None:
        """The request has ended; an unknown one is ignored."""
        self.windows.finish(request_id)

    def choose(
        self, limits: Sequence[DraftLimits], contexts: Int64s, cost: StepCost | None, load: Load
    ) -> Int64s:
        """int64 [t]: the windows whose combs this step sends; NO_REQUEST for none.

        `cost` None: all of them, whatever they cost.
        """
        numbers = self.windows.request_rows.numbers_or(
            (limit.request_id for limit in limits), NO_REQUEST
        )
        for i, limit in enumerate(limits):
            if not limit.may_branch:
                numbers[i] = NO_REQUEST
        some = numbers[numbers >= 0]
        if not len(some):
            return numbers
        # A comb that was lost on its way leaves its window where it was, and the text goes on.
        self._stale[some] |= self._sent[some]
        self._sent[some] = False
        if cost is not None and not self._earns(numbers, contexts, cost, load):
            self._stale[some] = True
            self.worth += (PRIOR - self.worth) / FORGET
            numbers[:] = NO_REQUEST
            return numbers
        self.windows.restart(some[self._stale[some]])
        self._stale[some] = False
        self._sent[some] = True
        return numbers

    def _earns(self, numbers: Int64s, contexts: Int64s, cost: StepCost, load: Load) -> bool:
        nodes = self.windows.comb_nodes(numbers)
        base, forward, _, tree, root = cost.prices(contexts, load, int(nodes.sum()))
        time = forward[-1] + float((tree * nodes + root * (nodes > 0)).sum())
        decodes = len(contexts) + load.decodes
        return self.worth * int((numbers >= 0).sum()) > decodes / base * time

    def comb_nodes(self, numbers: Int64s) -> Int64s:
        """int64 [t]: the nodes that the combs of these windows take at most."""
        return self.windows.comb_nodes(numbers)

    def join(
        self,
        forest: DraftForest,
        numbers: Int64s,
        limits: Sequence[DraftLimits],
        max_nodes: int,
        cost: StepCost | None = None,
    ) -> DraftForest:
        """The trees, best first, with the combs that `choose` chose behind them.

        Where nothing else is sent and a look at a plain step is due, there are none.
        """
        some = numbers[numbers >= 0]
        if not len(some):
            return forest
        if cost is not None and cost.drafting >= PROBE_AFTER_STEPS and not forest.num_nodes:
            self._sent[some], self._stale[some] = False, True
            return forest
        nodes = np.array([limit.max_nodes for limit in limits], np.int64).clip(0, max_nodes)
        depths = np.array([limit.max_depth for limit in limits], np.int64)
        return self.windows.append_combs(forest, numbers, nodes, depths, COMB_PROB)

    def iterate(self, verified: Verified, roots: Int32s) -> tuple[Int32s, Int64s]:
        """Move the windows on whose combs were verified; `roots` int32 [t] are the trees'.

        Returns the n-grams int32 [m, N] and the number of each one's tree, int64 [m].
        """
        forest = verified.forest
        all_numbers = self.windows.request_rows.numbers_or(verified.request_ids, NO_REQUEST)
        with_comb = np.flatnonzero(
            (all_numbers >= 0) & self._sent[all_numbers] & (forest.sizes > 0)
        )
        if not len(with_comb):
            return np.empty((0, 0), np.int32), np.empty(0, np.int64)
        numbers = all_numbers[with_comb]
        self._sent[numbers] = False
        brought = np.bincount(
            forest.owners[verified.accepted & (forest.sources == WINDOW)], minlength=len(forest)
        )[with_comb]
        fade = (1 - 1 / MEMORY) ** len(with_comb)
        self.worth = fade * self.worth + (1 - fade) * float(brought.mean())
        ngrams, owners = self.windows.iterate(
            numbers,
            roots[with_comb],
            forest.firsts[with_comb],
            forest.sizes[with_comb],
            verified.at_roots[with_comb, 0],
            np.ascontiguousarray(verified.at_nodes[:, 0]),
            verified.lengths[with_comb],
            self._shift,
        )
        return ngrams, with_comb[owners]


def shape_for(options: LookaheadOptions, overrides: RequestOverrides) -> WindowShape:
    """The window of a request with these overrides; no larger than the server's."""
    size, ngram = options.window
    if overrides.window_size is not None:
        size = min(size, overrides.window_size)
    if overrides.ngram_size is not None:
        ngram = min(ngram, overrides.ngram_size)
    return WindowShape(0 if overrides.proposer == "ngram_trie" else size, ngram)
