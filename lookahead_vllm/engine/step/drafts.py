"""The drafts of a step, before they have a place in its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import NOTHING_WANTED, WantedDrafts
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.step.placed_trees import PlacedTrees


class Plan(NamedTuple):
    """The drafts of a step before the tokens of the one before are known."""

    req_ids: Sequence[str]
    """The requests that decode."""
    wanted: WantedDrafts
    load: Load
    """Prompt tokens of the other requests of the step."""


NOTHING_PLANNED = Plan((), NOTHING_WANTED, Load())
"""A step without drafts: the tokens before it are only read."""


class Drafts(NamedTuple):
    """The drafts of one step; the drafting rank sends them to the other ranks."""

    req_ids: Sequence[str]
    """The requests of the step that decode."""
    forest: DraftForest
    """A tree for each of them, possibly without nodes."""
    num_tokens: Int64s
    """int64 [t]: the tokens of prompt and answer of each, the last one is the root; 0 if they are
    not known."""
    from_proposer: NDArray[np.bool_] | None = None
    """bool [t]: which trees are the proposer's, None for all; the others were changed by a
    grammar."""
    pays: bool = False
    """Whether further steps should wait for drafts."""
    whole_chain: bool = True
    """Whether a trained drafter makes its whole chain after this step."""
    waited: bool = True
    """Whether the device waited for them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without probabilities and sources, which only the drafting rank needs, and as one byte
        string, because the device waits for it."""
        forest, count = self.forest, len(self.req_ids)
        changed = np.zeros(count, np.bool_) if self.from_proposer is None else ~self.from_proposer
        nodes = forest.tokens, forest.parents, forest.depths
        fields = np.concatenate((forest.firsts, self.num_tokens, changed, *nodes)).astype(np.int32)
        flags = self.pays, self.whole_chain, self.waited
        return _received, (list(self.req_ids), fields.tobytes(), *flags)

    def padded(self, slots: Mapping[str, Sequence[int]]) -> Drafts:
        """A tree with as many nodes as it has slots for each request; see `DraftForest.padded`."""
        req_ids, forest, num_tokens = self.req_ids, self.forest, self.num_tokens
        if missing := [*(slots.keys() - req_ids)]:  # as in vLLM's warm-up
            req_ids, forest = [*req_ids, *missing], forest.with_empty(len(missing))
            num_tokens = np.append(num_tokens, np.zeros(len(missing), np.int64))
        sizes = np.array([len(slots.get(req_id, ())) for req_id in req_ids], np.int64)
        return self._replace(
            req_ids=req_ids, forest=forest.padded(sizes), num_tokens=num_tokens, from_proposer=None
        )

    def in_batch(self, req_ids: Sequence[str], num_tokens: Int32s) -> PlacedTrees:
        """The trees with nodes in the order of the batch, whose requests have `num_tokens` int32
        [r] rows: those that decode, a root and its nodes."""
        rows = self.rows_in(req_ids)
        assert (num_tokens[rows] == 1 + self.forest.sizes).all()
        return self.placed(rows, np.append(0, np.cumsum(num_tokens)))

    def placed(self, rows: Int64s, starts: Int32s | Int64s) -> PlacedTrees:
        """The trees with nodes in the order of the batch.

        Parameters
        ----------
        rows : int64 [t]
            The row of the batch of each tree's request.
        starts : int [r + 1]
            The first token of each request, then the number of tokens.
        """
        forest, from_proposer = self.forest, self.from_proposer
        if from_proposer is None:
            from_proposer = np.ones(len(forest), np.bool_)
        contexts = self.num_tokens - 1
        is_in_order = forest.sizes.all() and (rows[1:] > rows[:-1]).all()  # as in most steps
        if not is_in_order:
            kept = np.flatnonzero(forest.sizes)
            kept = kept[np.argsort(rows[kept])]
            forest, rows = forest.take(kept, forest.sizes[kept]), rows[kept]
            contexts, from_proposer = contexts[kept], from_proposer[kept]
        return PlacedTrees(forest, rows, starts[rows].astype(np.int64), contexts, from_proposer)

    def rows_in(self, req_ids: Sequence[str]) -> Int64s:
        """The row of the batch of each tree's request, int64 [t]."""
        if req_ids is self.req_ids:
            return np.arange(len(req_ids))
        row_of = {req_id: row for row, req_id in enumerate(req_ids)}
        return np.array([row_of[req_id] for req_id in self.req_ids], np.int64)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of nodes of each request that has any."""
        sizes = zip(self.req_ids, self.forest.sizes.tolist(), strict=True)
        return {req_id: size for req_id, size in sizes if size}


def _received(req_ids: list[str], fields: bytes, *flags: bool) -> Drafts:
    t = len(req_ids)
    values = np.frombuffer(bytearray(fields), np.int32)  # an array that can be written to
    firsts, num_tokens = (
        values[: t + 1].astype(np.int64),
        values[t + 1 : 2 * t + 1].astype(np.int64),
    )
    tokens, parents, depths = values[3 * t + 1 :].reshape(3, -1)
    probs, sources = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.uint8)
    forest = DraftForest(tokens, parents, probs, depths, sources, firsts)
    unchanged = values[2 * t + 1 : 3 * t + 1] == 0
    return Drafts(req_ids, forest, num_tokens, unchanged, *flags)


NO_TREES = Drafts((), DraftForest.of([]), np.empty(0, np.int64))
