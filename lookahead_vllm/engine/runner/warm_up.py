"""Drafts for the made-up requests of vLLM's warm-up, so that it compiles what serving needs."""

from collections.abc import Collection
from typing import Any

import numpy as np

from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.step.drafts import NO_TREES, Drafts
from lookahead_vllm.engine.step.step import Step


class WarmUpDrafts:
    """Replaces `LateDrafts` while vLLM warms up: fills every slot, and learns nothing.

    Parameters
    ----------
    may_branch
        Whether the trees branch.
    max_nodes
        The most nodes of a step.
    """

    drafted_for, may_skip_wait = (), False
    """See `LateDrafts`."""

    def __init__(self, may_branch: bool, max_nodes: int) -> None:
        self._may_branch = may_branch
        self._max_nodes = max_nodes

    def start(self, new: Any) -> None:
        """Do nothing."""

    def finish(self, request_id: str) -> None:
        """Do nothing."""

    def add_step(self, step: Step) -> None:
        """Do nothing."""

    def count(self, wait: bool = True) -> None:
        """Do nothing."""

    def would_pay(self, scheduled: Any) -> bool:
        return False

    def could_draft(self, step: Step) -> bool:
        return False

    def contexts(self, step: Step) -> Int64s:
        return np.zeros(step.batch.num_reqs, np.int64)

    def grow(self, step: Step, chains_only: Collection[str] = ()) -> Drafts:
        """A draft for each request with slots; the first two nodes are children of the root."""
        scheduled, most = step.offered, step.most_nodes
        slots = scheduled.scheduled_spec_decode_tokens
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        req_ids = [req_id for req_id, own in slots.items() if own and req_id in computed]
        if not req_ids:
            return NO_TREES
        trees = []
        for req_id in req_ids:
            size = len(slots[req_id])
            parents = list(range(-1, size - 1))
            if self._may_branch and req_id not in chains_only:
                parents = [-1, -1, *range(size - 2)][:size]
            trees.append(DraftTree.from_lists([node % 2 for node in range(size)], parents))
        max_nodes = self._max_nodes if most is None else min(most, self._max_nodes)
        forest = DraftForest.of(trees).at_most(max_nodes)
        if not forest.num_nodes:  # more requests than nodes
            return NO_TREES
        num_tokens = np.array([computed[req_id] + 1 for req_id in req_ids], np.int64)
        return Drafts(req_ids, forest, num_tokens)
