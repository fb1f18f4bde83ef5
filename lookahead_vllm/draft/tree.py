"""The draft tree, the format of every draft; and the forest, the trees of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel

UNKNOWN = -1
"""Marks a prompt position without a token id, an embedding. No n-gram reaches across it."""


class DraftTreeError(ValueError):
    """A proposer returned an invalid draft tree; the message names the fault."""


@dataclass(slots=True, eq=False)  # not frozen: that adds a microsecond to each construction
class DraftTree:
    """A tree of draft tokens. Its root, the last committed token, is not stored.

    Parents precede their children, and likelier nodes come first. Every prefix of the arrays is a
    valid tree too, so a draft may be cut anywhere.
    """

    tokens: Int32s
    """int32 [n]"""
    parents: Int32s
    """int32 [n]: the index of each node's parent, smaller than the node's own; -1 is the root."""
    probs: NDArray[np.float32]
    """float32 [n]: the proposer's estimate of the probability that the node is accepted, the
    product along its path, in [0, 1]."""
    depths: Int32s
    """int32 [n]: 1 for a child of the root."""
    sources: NDArray[np.uint8]
    """uint8 [n]: the source of each node, an index into `sources.NAMES`."""

    @classmethod
    def from_lists(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        probs: Sequence[float] | None = None,
        sources: Sequence[int] | None = None,
    ) -> DraftTree:
        """Build a tree from plain lists. Without `probs`, every node has probability 1; without
        `sources`, source 0."""
        n = len(tokens)
        if any(values is not None and len(values) != n for values in (parents, probs, sources)):
            raise DraftTreeError("tokens, parents, probs and sources differ in length")
        depths = np.empty(n, np.int32)
        for i, parent in enumerate(parents):
            if not -1 <= parent < i:
                raise DraftTreeError(
                    f"node {i} has parent {parent}; a parent is -1 (the root) or an earlier node"
                )
            depths[i] = 1 if parent < 0 else depths[parent] + 1
        return cls(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.ones(n, np.float32) if probs is None else np.asarray(probs, dtype=np.float32),
            depths,
            np.zeros(n, np.uint8) if sources is None else np.asarray(sources, dtype=np.uint8),
        )

    @classmethod
    def chain(cls, tokens: Sequence[int], probs: Sequence[float] | None = None) -> DraftTree:
        """A tree with one branch: each token is the child of the token before it."""
        return cls.from_lists(tokens, range(-1, len(tokens) - 1), probs)

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY_TREE = DraftTree.chain([])


ForestFields = tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]
"""The fields of a DraftForest."""


class ForestArrays(NamedTuple):
    """The fields of a DraftForest, as kernels take them."""

    tokens: Int32s
    parents: Int32s
    probs: NDArray[np.float32]
    depths: Int32s
    sources: NDArray[np.uint8]
    firsts: Int64s


@dataclass(eq=False)
class DraftForest(Sequence[DraftTree]):
    """The draft trees of one step, concatenated, so that one kernel call handles all of them.

    Attributes
    ----------
    tokens, parents, depths, probs, sources : [n]
        As in DraftTree; `parents` are indices within the tree.
    firsts : int64 [t + 1]
        The first node of each of the t trees, then n.
    """

    tokens: Int32s
    parents: Int32s
    probs: NDArray[np.float32]
    depths: Int32s
    sources: NDArray[np.uint8]
    firsts: Int64s

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> DraftForest:
        """Concatenate `trees`; a DraftForest is returned as it is."""
        if isinstance(trees, DraftForest):
            return trees
        firsts = np.zeros(len(trees) + 1, np.int64)
        np.cumsum([len(tree) for tree in trees], out=firsts[1:])
        at_least_one = trees or [EMPTY_TREE]  # np.concatenate refuses an empty list
        return cls(
            np.concatenate([tree.tokens for tree in at_least_one]),
            np.concatenate([tree.parents for tree in at_least_one]),
            np.concatenate([tree.probs for tree in at_least_one]),
            np.concatenate([tree.depths for tree in at_least_one]),
            np.concatenate([tree.sources for tree in at_least_one]),
            firsts,
        )

    @classmethod
    def of_chains(cls, lengths: Int64s, source: int) -> DraftForest:
        """Chains of `lengths` nodes, int64 [t], whose tokens are UNKNOWN."""
        firsts = np.append(0, np.cumsum(lengths))
        places = (np.arange(firsts[-1]) - np.repeat(firsts[:-1], lengths)).astype(np.int32)
        n = len(places)
        tokens, probs = np.full(n, UNKNOWN, np.int32), np.zeros(n, np.float32)
        return cls(tokens, places - 1, probs, places + 1, np.full(n, source, np.uint8), firsts)

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
        nodes = slice(int(self.firsts[i]), int(self.firsts[i + 1]))
        return DraftTree(
            self.tokens[nodes],
            self.parents[nodes],
            self.probs[nodes],
            self.depths[nodes],
            self.sources[nodes],
        )

    @property
    def arrays(self) -> ForestFields:
        """The fields of ForestArrays."""
        return self.tokens, self.parents, self.probs, self.depths, self.sources, self.firsts

    @property
    def num_nodes(self) -> int:
        """The number of nodes of all trees together."""
        return len(self.tokens)

    @cached_property
    def sizes(self) -> Int64s:
        """int64 [t]: the number of nodes of each tree."""
        return np.diff(self.firsts)

    @cached_property
    def owners(self) -> Int64s:
        """int64 [n]: the index of each node's tree."""
        return _owners(self.firsts)

    @cached_property
    def places(self) -> Int64s:
        """int64 [n]: the index of each node within its tree."""
        return np.arange(self.num_nodes) - self.firsts[self.owners]

    @cached_property
    def branching(self) -> NDArray[np.bool_]:
        """bool [t]: whether each tree has more than one branch."""
        return find_branching(self.parents, self.firsts)

    def take(self, trees: Int64s, sizes: Int64s) -> DraftForest:
        """The trees with these indices, each cut to its first `sizes` nodes; both int64 [m]."""
        if np.array_equal(sizes, self.sizes) and np.array_equal(trees, np.arange(len(self))):
            return self
        chained = np.zeros(len(trees), np.bool_)
        kept, parents, firsts = take_nodes(self.parents, self.firsts, trees, sizes, chained)
        return self._of(kept, parents, firsts)

    def _of(self, nodes: Int64s, parents: Int32s, firsts: Int64s) -> DraftForest:
        """A forest of these nodes, with other parents."""
        depths, sources = self.depths[nodes], self.sources[nodes]
        return DraftForest(self.tokens[nodes], parents, self.probs[nodes], depths, sources, firsts)

    def at_most(self, num_nodes: int) -> DraftForest:
        """Cut the largest trees to one size, so that there are at most `num_nodes` in all."""
        if self.num_nodes <= num_nodes:
            return self
        levels = np.arange(self.sizes.max() + 1)
        totals = np.minimum.outer(levels, self.sizes).sum(axis=1)
        level = int(np.searchsorted(totals, num_nodes, side="right")) - 1
        return self.take(np.arange(len(self)), np.minimum(self.sizes, level))

    def keep(self, kept: NDArray[np.bool_]) -> DraftForest:
        """Keep these nodes of each tree, bool [n]; the parent of a kept node is kept too."""
        nodes = np.flatnonzero(kept)
        firsts = np.append(0, np.cumsum(kept))[self.firsts]
        places = np.cumsum(kept) - 1 - firsts[self.owners]
        parents = self.parents[nodes].astype(np.int64)
        places_of_parents = places[self.firsts[self.owners[nodes]] + parents]
        return self._of(
            nodes, np.where(parents < 0, -1, places_of_parents).astype(np.int32), firsts
        )

    def padded(self, sizes: Int64s) -> DraftForest:
        """Trees of these sizes, int64 [t], none smaller than now. The nodes that are missing have
        token 0 and probability 0, each the child of the last one."""
        if np.array_equal(sizes, self.sizes):
            return self
        return DraftForest(*_padded(self.arrays, sizes))

    def with_empty(self, count: int) -> DraftForest:
        """Append `count` empty trees."""
        return replace(self, firsts=np.append(self.firsts, np.full(count, self.num_nodes)))


@kernel
def first_nodes(forest: ForestArrays, size: int) -> ForestFields:
    """The fields of a DraftForest of `size` nodes, from arrays that may be longer."""
    return (
        forest.tokens[:size].copy(),
        forest.parents[:size].copy(),
        forest.probs[:size].copy(),
        forest.depths[:size].copy(),
        forest.sources[:size].copy(),
        forest.firsts,
    )


@kernel
def _padded(forest: ForestFields, sizes: Int64s) -> ForestFields:
    forest = ForestArrays(*forest)
    n = sizes.sum()
    fields = np.zeros((3, n), np.int32)
    tokens, parents, depths = fields[0], fields[1], fields[2]
    probs, sources = np.zeros(n, np.float32), np.zeros(n, np.uint8)
    firsts = np.zeros(len(sizes) + 1, np.int64)
    for tree in range(len(sizes)):
        first = firsts[tree]
        firsts[tree + 1] = first + sizes[tree]
        size = forest.firsts[tree + 1] - forest.firsts[tree]
        for place in range(sizes[tree]):
            at = first + place
            if place < size:
                node = forest.firsts[tree] + place
                tokens[at], parents[at] = forest.tokens[node], forest.parents[node]
                depths[at] = forest.depths[node]
                probs[at], sources[at] = forest.probs[node], forest.sources[node]
            else:
                parents[at] = place - 1
                depths[at] = 1 + (depths[at - 1] if place else 0)
    return tokens, parents, probs, depths, sources, firsts


@kernel
def _owners(firsts: Int64s) -> Int64s:
    owners = np.empty(firsts[-1], np.int64)
    for tree in range(len(firsts) - 1):
        owners[firsts[tree] : firsts[tree + 1]] = tree
    return owners


@kernel
def find_branching(parents: Int32s, firsts: Int64s) -> NDArray[np.bool_]:
    """Whether each tree has more than one branch, bool [t]; arguments as in DraftForest."""
    branching = np.zeros(len(firsts) - 1, np.bool_)
    for tree in range(len(branching)):
        for place in range(firsts[tree + 1] - firsts[tree]):
            branching[tree] |= parents[firsts[tree] + place] != place - 1
    return branching


@kernel
def take_nodes(
    parents: Int32s, firsts: Int64s, trees: Int64s, sizes: Int64s, chained: NDArray[np.bool_]
) -> tuple[Int64s, Int32s, Int64s]:
    """As `DraftForest.take`; returns the kept nodes int64 [m], their parents and new `firsts`.

    Trees marked in `chained`, bool [m], are also cut to the branch of first children.
    """
    max_kept = sizes.sum()
    kept, new_parents = np.empty(max_kept, np.int64), np.empty(max_kept, np.int32)
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
