"""The draft trees of one forward pass, laid out for tree attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest, DraftTree


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The branching draft trees of one forward pass.

    A tree's rows are its root, then its nodes in list order; they are consecutive query tokens.
    The K/V of row j are in the request's KV slot `context + j`: slots follow list order, not
    position order. Every row attends to the slots 0..context-1 and to the rows of its own tree that
    `masks` selects.

    Attributes
    ----------
    forest : DraftForest
        The t trees.
    requests : int32 [t]
        The request's place in the batch, which is its row of the block table.
    starts : int32 [t]
        Index of the root among the flattened query tokens.
    sizes : int32 [t]
        Nodes + 1.
    contexts : int32 [t]
        Committed tokens before the root; also the root's position and its KV slot.
    depths : int32 [n], n = sum(sizes)
        Depth of each row, the root 0. The row's position is context + depth.
    masks : int32 [n, w], w = ceil(max(sizes) / 32)
        Bit j % 32 of word j // 32 is set if the row attends to row j of its tree: itself or an
        ancestor.
    """

    forest: DraftForest
    requests: Tensor
    starts: Tensor
    sizes: Tensor
    contexts: Tensor
    depths: Tensor
    masks: Tensor

    @classmethod
    def build(
        cls,
        trees: Sequence[DraftTree],
        requests: ArrayLike,
        starts: ArrayLike,
        contexts: ArrayLike,
    ) -> TreeBatch:
        """Lay out `trees` on the CPU; `requests`, `starts`, `contexts` have an entry for each."""
        forest = DraftForest.of(trees)
        sizes = (forest.sizes + 1).astype(np.int32)
        words = (int(sizes.max(initial=1)) + 31) // 32
        depths, masks = lay_out(forest.parents, forest.depths, forest.firsts, words)
        return cls(
            forest,
            _int32(requests),
            _int32(starts),
            torch.from_numpy(sizes),
            _int32(contexts),
            torch.from_numpy(depths),
            torch.from_numpy(masks),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def ends(self) -> tuple[int, int, int]:
        """Rows of the block table, query tokens and KV slots per request that the batch needs."""
        if not len(self):
            return 0, 0, 0
        return (
            int(self.requests.max()) + 1,
            int((self.starts + self.sizes).max()),
            int((self.contexts + self.sizes).max()),
        )


@kernel
def lay_out(parents: Int32s, depths: Int32s, firsts: Int64s, words: int) -> tuple[Int32s, Int32s]:
    """The `depths` and `masks` of a TreeBatch with these trees."""
    num_trees = len(firsts) - 1
    row_depths = np.zeros(len(parents) + num_trees, np.int32)
    masks = np.zeros((len(parents) + num_trees, words), np.int32)
    for tree in range(num_trees):
        first = firsts[tree]
        root = first + tree
        masks[root, 0] = 1
        for place in range(firsts[tree + 1] - first):
            row = root + 1 + place
            masks[row] = masks[root + 1 + parents[first + place]]
            masks[row, (place + 1) // 32] |= np.int32(np.int64(1) << ((place + 1) % 32))
            row_depths[row] = depths[first + place]
    return row_depths, masks


def _int32(values: ArrayLike) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
