"""The draft tree: the one shape in which every guess travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel

UNKNOWN = -1
"""Stands in a prompt for what has no token id, an embedding. Behind it a text begins anew."""


class DraftTreeError(ValueError):
    """A grower returned something that is not a draft tree; the message says what."""


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond, and there are many
class DraftTree:
    """Guessed tokens hanging from the last committed token, the root.

    The root itself is not stored. Nodes stand parents before children, best first, so that
    every prefix of the lists is a valid tree too: the scheduler may cut a draft anywhere.

    Attributes
    ----------
    tokens : int32 [n]
        The guessed token of each node.
    parents : int32 [n]
        Index of each node's parent, smaller than its own; -1 is the root.
    probs : float32 [n]
        The grower's estimate that the node is accepted (the product along its path), in [0, 1].
    """

    tokens: Int32s
    parents: Int32s
    probs: NDArray[np.float32]
    depths: Int32s = None  # type: ignore[assignment]  # until __post_init__
    """int32 [n]: 1 for a child of the root; found out where it is not given."""
    sources: NDArray[np.uint8] = None  # type: ignore[assignment]
    """uint8 [n]: who guessed the node, a number of the grower's; 0 where it is not given."""

    def __post_init__(self) -> None:
        if self.sources is None:
            self.sources = np.zeros(len(self.tokens), np.uint8)
        if self.depths is not None:
            return
        depths = np.empty(len(self.parents), dtype=np.int32)
        for i, parent in enumerate(self.parents.tolist()):
            if not -1 <= parent < i:
                raise DraftTreeError(
                    f"node {i} has parent {parent}; a parent is -1 (the root) or an earlier node"
                )
            depths[i] = 1 if parent < 0 else depths[parent] + 1
        self.depths = depths

    @classmethod
    def from_lists(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        probs: Sequence[float] | None = None,
        sources: Sequence[int] | None = None,
    ) -> DraftTree:
        """Build a tree from plain lists; without `probs` every node counts as certain."""
        n = len(tokens)
        if any(values is not None and len(values) != n for values in (parents, probs, sources)):
            raise DraftTreeError("tokens, parents, probs and sources differ in length")
        return cls(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.ones(n, np.float32) if probs is None else np.asarray(probs, dtype=np.float32),
            sources=np.zeros(n, np.uint8)
            if sources is None
            else np.asarray(sources, dtype=np.uint8),
        )

    @classmethod
    def chain(cls, tokens: Sequence[int], probs: Sequence[float] | None = None) -> DraftTree:
        """A tree with one branch: each token hangs from the one before it."""
        return cls.from_lists(tokens, range(-1, len(tokens) - 1), probs)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True for a single branch, which plain causal attention verifies as it is."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def prefix(self, n: int) -> DraftTree:
        """The tree of the first `n` nodes."""
        if n >= len(self):
            return self
        return DraftTree(
            self.tokens[:n], self.parents[:n], self.probs[:n], self.depths[:n], self.sources[:n]
        )

    def check(self, vocab_size: int, max_nodes: int) -> None:
        """Refuse what would make verification wrong: DraftTreeError says what is off."""
        fault = int(DraftForest.of([self]).faults(vocab_size, np.array([max_nodes]))[0])
        if fault:
            raise DraftTreeError(_FAULTS[fault].format(len(self), max_nodes, vocab_size))


EMPTY_TREE = DraftTree.chain([])

_TOO_MANY, _FOREIGN, _TWINS = 1, 2, 3
_FAULTS = {
    _TOO_MANY: "{0} nodes, more than the {1} allowed",
    _FOREIGN: "a token lies outside the vocabulary of {2}",
    _TWINS: "two children of one node carry the same token",
}


@dataclass(eq=False)
class DraftForest(Sequence[DraftTree]):
    """The draft trees of one step, one after another, so that one call does for all.

    Attributes
    ----------
    tokens, parents, depths, probs, sources : [n]
        As in DraftTree; a parent is a number within its own tree.
    firsts : int64 [t + 1]
        The first node of each of the t trees, and n.
    """

    tokens: Int32s
    parents: Int32s
    probs: NDArray[np.float32]
    depths: Int32s
    sources: NDArray[np.uint8]
    firsts: Int64s

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> DraftForest:
        """The forest of these trees."""
        if isinstance(trees, DraftForest):
            return trees
        firsts = np.zeros(len(trees) + 1, np.int64)
        np.cumsum([len(tree) for tree in trees], out=firsts[1:])
        some = trees or [EMPTY_TREE]
        return cls(
            np.concatenate([tree.tokens for tree in some]),
            np.concatenate([tree.parents for tree in some]),
            np.concatenate([tree.probs for tree in some]),
            np.concatenate([tree.depths for tree in some]),
            np.concatenate([tree.sources for tree in some]),
            firsts,
        )

    def __len__(self) -> int:
        return len(self.firsts) - 1

    @overload
    def __getitem__(self, i: int) -> DraftTree: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[DraftTree]: ...
    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        own = slice(int(self.firsts[i]), int(self.firsts[i + 1]))
        return DraftTree(
            self.tokens[own],
            self.parents[own],
            self.probs[own],
            self.depths[own],
            self.sources[own],
        )

    @property
    def num_nodes(self) -> int:
        """Of all trees together."""
        return len(self.tokens)

    @cached_property
    def sizes(self) -> Int64s:
        """int64 [t]: the nodes of each tree."""
        return np.diff(self.firsts)

    @cached_property
    def owners(self) -> Int64s:
        """int64 [n]: the tree of each node."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def places(self) -> Int64s:
        """int64 [n]: the number of each node within its tree."""
        return np.arange(self.num_nodes) - self.firsts[self.owners]

    @cached_property
    def branching(self) -> NDArray[np.bool_]:
        """bool [t]: the trees that are no chains."""
        return np.bincount(self.owners[self.parents != self.places - 1], minlength=len(self)) > 0

    def cut(self, sizes: Int64s, chained: NDArray[np.bool_] | None = None) -> DraftForest:
        """The first `sizes` int64 [t] nodes of each tree; of those that are `chained`, bool [t],
        only the branch that takes the first child of every node."""
        if chained is None:
            chained = np.zeros(len(self), np.bool_)
        return self.take(np.arange(len(self)), sizes, chained)

    def take(
        self, trees: Int64s, sizes: Int64s, chained: NDArray[np.bool_] | None = None
    ) -> DraftForest:
        """The forest of these trees, int64 [m], cut to `sizes` nodes each, int64 [m]."""
        if chained is None:
            chained = np.zeros(len(trees), np.bool_)
        kept, parents, firsts = _take(self.parents, self.firsts, trees, sizes, chained)
        depths = self.depths[kept]
        return DraftForest(
            self.tokens[kept], parents, self.probs[kept], depths, self.sources[kept], firsts
        )

    def with_empty(self, count: int) -> DraftForest:
        """The same trees, and so many without a node behind them."""
        return replace(self, firsts=np.append(self.firsts, np.full(count, self.num_nodes)))

    def faults(self, vocab_size: int, max_nodes: Int64s) -> Int64s:
        """int64 [t]: 0 for every tree that is one; `max_nodes` int64 [t] are allowed."""
        return _find_faults(self.tokens, self.parents, self.firsts, vocab_size, max_nodes)


@kernel
def _take(
    parents: Int32s, firsts: Int64s, trees: Int64s, sizes: Int64s, chained: NDArray[np.bool_]
) -> tuple[Int64s, Int32s, Int64s]:
    """Which nodes are kept, int64 [m]; their parents int32 [m]; the first one of each tree."""
    most = sizes.sum()
    kept, new_parents = np.empty(most, np.int64), np.empty(most, np.int32)
    new_firsts = np.zeros(len(trees) + 1, np.int64)
    size = 0
    for i, tree in enumerate(trees):
        tip = -1
        for place in range(sizes[i]):
            node = firsts[tree] + place
            if chained[i]:
                if parents[node] != tip:
                    continue
                new_parents[size] = size - new_firsts[i] - 1
                tip = place
            else:
                new_parents[size] = parents[node]
            kept[size] = node
            size += 1
        new_firsts[i + 1] = size
    return kept[:size], new_parents[:size], new_firsts


@kernel
def _find_faults(
    tokens: Int32s, parents: Int32s, firsts: Int64s, vocab_size: int, max_nodes: Int64s
) -> Int64s:
    faults = np.zeros(len(firsts) - 1, np.int64)
    for tree in range(len(faults)):
        first, end = firsts[tree], firsts[tree + 1]
        if end - first > max_nodes[tree]:
            faults[tree] = _TOO_MANY
            continue
        for node in range(first, end):
            if not 0 <= tokens[node] < vocab_size:
                faults[tree] = _FOREIGN
            for other in range(first, node):
                if parents[other] == parents[node] and tokens[other] == tokens[node]:
                    faults[tree] = max(faults[tree], _TWINS)
    return faults
