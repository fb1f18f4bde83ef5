"""The lookahead branch of a step: whose combs are sent, and whether they are worth their cost."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.sources import WINDOW
from lookahead_vllm.draft.tree import UNKNOWN, DraftForest
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.draft.window.grid import VerifiedCombs, Windows
from lookahead_vllm.options.window import WindowShape

COMB_PROB = 0.0005
"""The probability of a node that only the comb adds. Such a node is sent for the model's choice at
it."""

PRIOR_TOKENS = 0.3
"""Tokens a step that a comb is expected to gain for its request, before any comb was verified."""
MEMORY_COMBS = 100
"""Time constant of the moving average of worth, in verified combs."""
RETRY_STEPS = 2000
"""Time constant, in steps without combs, with which worth returns to PRIOR_TOKENS."""
SKIP_AFTER_STEPS = 16
"""After this many steps with drafts, a step whose trees are empty sends no combs, to refresh the
cost of a step without drafts."""
NO_WINDOW = -1
"""Replaces the row of a request that sends no comb."""


class LookaheadBranch:
    """The windows of all requests, and how much their combs are worth.

    A window's n-grams become output in later steps. So a comb's worth is the number of accepted
    nodes that came from the windows' n-grams, for each comb sent. If the cost of a step has been
    measured, a step sends the combs of all its requests when they are worth more than they cost,
    else none.
    """

    def __init__(self, shape: WindowShape) -> None:
        self.windows = Windows(shape)
        self.worth = PRIOR_TOKENS
        """Tokens that a comb gains, on average."""
        self._has_window = shape.window_size > 0
        capacity = self.windows.request_rows.capacity
        self._sent = np.zeros(capacity, np.bool_)
        """The comb was sent and has not been verified."""
        self._stale = np.zeros(capacity, np.bool_)
        """A step passed without the comb, so the window no longer fits the text."""

    def start(self, request_id: str, prompt: Int32s) -> None:
        """A request starts; it has no window if W = 0."""
        if not self._has_window or not len(known := prompt[prompt != UNKNOWN]):
            return
        self.windows.start(request_id, known)
        self._sent = self.windows.request_rows.resized(self._sent)
        self._stale = self.windows.request_rows.resized(self._stale)
        row = self.windows.request_rows.row_of(request_id)
        self._sent[row] = self._stale[row] = False

    def finish(self, request_id: str) -> None:
        """The request has ended; an unknown one is ignored."""
        self.windows.finish(request_id)

    def resume(self) -> None:
        """Continue after steps in which the model's choices were not known."""
        self._stale[:] = True
        self._sent[:] = False

    def rows_of(self, request_ids: Sequence[str], may_branch: NDArray[np.bool_]) -> Int64s:
        """The window of each request that may branch: int64 [t], rows or NO_WINDOW."""
        if not self._has_window:
            return np.full(len(request_ids), NO_WINDOW)
        rows = self.windows.request_rows.rows_or(request_ids, NO_WINDOW)
        rows[~may_branch] = NO_WINDOW
        return rows

    def skip_step(self, rows: Int64s, contexts: Int64s, load: Load, cost: StepCost | None) -> bool:
        """Whether a step has nothing to do with the windows `rows` int64 [t]; then it is skipped.

        So it is if no comb waits for its verification, and none pays.
        """
        present = rows[rows >= 0]
        if not len(present):
            return True
        if self._sent[present].any() or cost is None or self._pays(rows, contexts, cost, load):
            return False
        self._skip(present)
        return True

    def _skip(self, present: Int64s) -> None:
        self._stale[present] = True
        self.worth += (PRIOR_TOKENS - self.worth) / RETRY_STEPS

    def choose(self, rows: Int64s, contexts: Int64s, load: Load, cost: StepCost | None) -> Int64s:
        """The windows whose combs this step sends, of `rows` int64 [t]: rows or NO_WINDOW.

        If `cost` is None, all combs are sent.
        """
        present = rows[rows >= 0]
        if not len(present):
            return rows
        # If a comb was sent and never verified, its window did not move while the text grew.
        self._stale[present] |= self._sent[present]
        self._sent[present] = False
        if cost is not None and not self._pays(rows, contexts, cost, load):
            self._skip(present)
            return np.full_like(rows, NO_WINDOW)
        self.windows.restart(present[self._stale[present]])
        self._stale[present] = False
        self._sent[present] = True
        return rows

    def _pays(self, rows: Int64s, contexts: Int64s, cost: StepCost, load: Load) -> bool:
        nodes = self.windows.comb_nodes(rows)
        num_nodes = int(nodes.sum())
        prices = cost.prices(contexts, load, num_nodes)
        attention = (prices.tree * nodes + prices.root * (nodes > 0)).sum()
        time = prices.forward[num_nodes] + float(attention)
        rate = load.plain_tokens(len(contexts)) / prices.base
        return self.worth * int((rows >= 0).sum()) > rate * time

    def join(
        self,
        forest: DraftForest,
        rows: Int64s,
        max_nodes: Int64s,
        max_depths: Int64s,
        most: int,
        cost: StepCost | None = None,
    ) -> DraftForest:
        """The trees, with the combs appended.

        A tree has at most `max_nodes`, int64 [t], and at most `most` nodes, and `max_depths`
        levels, int64 [t].

        If the trees are empty and a plain step is due, no comb is sent either.
        """
        present = rows[rows >= 0]
        if not len(present):
            return forest
        if cost is not None and cost.steps_since_plain >= SKIP_AFTER_STEPS and not forest.num_nodes:
            self._sent[present], self._stale[present] = False, True
            return forest
        nodes = max_nodes.clip(0, most)
        return self.windows.append_combs(forest, rows, nodes, max_depths, COMB_PROB)

    def awaits(self, request_ids: Sequence[str]) -> bool:
        """Whether the comb of one of these requests was sent and has not been verified."""
        if not self._sent.any():
            return False
        rows = self.windows.request_rows.rows_or(request_ids, NO_WINDOW)
        return bool(self._sent[rows[rows >= 0]].any())

    def iterate(self, verified: Verified) -> None:
        """Advance the windows whose combs were verified."""
        forest = verified.forest
        rows = self.windows.request_rows.rows_or(verified.request_ids, NO_WINDOW)
        with_comb = np.flatnonzero((rows >= 0) & self._sent[rows] & (forest.sizes > 0))
        if not len(with_comb):
            return
        rows = rows[with_comb]
        self._sent[rows] = False
        from_window = np.bincount(
            forest.owners[verified.accepted & (forest.sources == WINDOW)], minlength=len(forest)
        )[with_comb]
        fade = (1 - 1 / MEMORY_COMBS) ** len(with_comb)
        self.worth = fade * self.worth + (1 - fade) * float(from_window.mean())
        best = np.ascontiguousarray(verified.tokens[:, 0])
        combs = VerifiedCombs(verified.roots[with_comb], forest.sizes[with_comb], best)
        self.windows.iterate(rows, combs)
