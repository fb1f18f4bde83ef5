"""The draft trees of one step: where their nodes are in the batch, and what was accepted.

Everything here works on arrays: rows of the batch, counts of tokens, logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.verify.choices import Choices
from lookahead_vllm.verify.layout.tree_batch import TreeBatch


@dataclass(eq=False)
class PlacedTrees:
    """The draft trees that one step verifies, in the order of the batch.

    Attributes
    ----------
    forest : DraftForest
        t trees.
    rows : int64 [t]
        The row of the batch of each tree's request.
    starts : int64 [t]
        Index of each root among the step's flattened tokens; the nodes follow it.
    contexts : int64 [t]
        Committed tokens before each root, which is the root's position.
    from_proposer : bool [t]
        Whether the tree is the proposer's; False if a grammar changed it.
    """

    forest: DraftForest
    rows: Int64s
    starts: Int64s
    contexts: Int64s
    from_proposer: NDArray[np.bool_]

    @classmethod
    def of_dummies(cls, trees: Sequence[DraftTree], context: int) -> PlacedTrees:
        """One request for each tree, `context` committed tokens each, for dummy runs."""
        forest = DraftForest.of(trees)
        tree = np.arange(len(forest))
        starts, contexts = forest.firsts[:-1] + tree, np.full(len(forest), context)
        return cls(forest, tree, starts, contexts, np.zeros(len(forest), np.bool_))

    @property
    def branches(self) -> bool:
        """Whether any tree is more than a chain."""
        return bool(self.forest.branching.any())

    def trees(self, with_chains: bool = False) -> TreeBatch | None:
        """What tree attention computes in this step, `with_chains` also chains; None if nothing."""
        chosen = np.flatnonzero(self.forest.sizes > 0 if with_chains else self.forest.branching)
        if not len(chosen):
            return None
        forest = self.forest.take(chosen, self.forest.sizes[chosen])
        places = np.stack((self.rows[chosen], self.starts[chosen], self.contexts[chosen]))
        return TreeBatch.build(forest, *places)

    def verified(
        self,
        choices: Choices,
        starts: Int32s | Int64s,
        req_ids: Sequence[str],
        with_roots_of: Collection[str] = (),
    ) -> Verified | None:
        """The model's likeliest tokens at roots and nodes; None if there is no row to look at.

        `accepted` is False until `mark_accepted`.

        Parameters
        ----------
        choices
            At all rows of logits: one for each request's root, and then for each of its nodes.
            There may be more for padding.
        starts : int [r + 1]
            The first of these rows of each request, then their number.
        req_ids
            The requests of the batch.
        with_roots_of
            Requests whose root is wanted although they have no node.
        """
        trees = np.flatnonzero(self.from_proposer)
        forest = self.forest
        if len(trees) < len(forest):
            forest = forest.take(trees, forest.sizes[trees])
        rows = self.rows[trees]
        if with_roots_of:
            bare = [
                row
                for row in np.flatnonzero(np.diff(starts) == 1).tolist()
                if req_ids[row] in with_roots_of
            ]
            rows = np.concatenate([rows, np.array(bare, np.int64)])
            forest = forest.with_empty(len(bare))
        if not len(rows):
            return None
        return Verified(
            [req_ids[row] for row in rows.tolist()],
            forest,
            choices.tokens,
            choices.gaps,
            starts[rows].astype(np.int64),
            np.zeros(forest.num_nodes, np.bool_),
        )

    def mark_accepted(self, verified: Verified, paths: Int32s) -> None:
        """Fill in which nodes of `verified` were accepted; `paths` as in `accepted_paths`."""
        accepted = paths[self.from_proposer]
        firsts = verified.forest.firsts[: len(accepted), None]
        verified.accepted[(firsts + accepted)[accepted >= 0]] = True


_NONE: Int64s = np.empty(0, np.int64)
NO_DRAFTS = PlacedTrees(DraftForest.of([]), _NONE, _NONE, _NONE, np.empty(0, np.bool_))
