"""The draft tree: the one shape in which every guess travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probs: NDArray[np.float32]
    depths: NDArray[np.int32] = None  # type: ignore[assignment]  # until __post_init__
    """int32 [n]: 1 for a child of the root; found out where it is not given."""

    def __post_init__(self) -> None:
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
    ) -> DraftTree:
        """Build a tree from plain lists; without `probs` every node counts as certain."""
        if len(tokens) != len(parents) or (probs is not None and len(probs) != len(tokens)):
            raise DraftTreeError("tokens, parents and probs differ in length")
        return cls(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.ones(len(tokens), np.float32)
            if probs is None
            else np.asarray(probs, dtype=np.float32),
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
        return DraftTree(self.tokens[:n], self.parents[:n], self.probs[:n], self.depths[:n])

    def best_chain(self) -> DraftTree:
        """The branch that takes the first, and so the likeliest, child of every node."""
        here, kept = -1, []
        for i, parent in enumerate(self.parents.tolist()):
            if parent == here:
                kept.append(i)
                here = i
        return DraftTree.chain(self.tokens[kept].tolist(), self.probs[kept].tolist())

    def check(self, vocab_size: int, max_nodes: int) -> None:
        """Refuse what would make verification wrong: DraftTreeError says what is off."""
        if len(self) > max_nodes:
            raise DraftTreeError(f"{len(self)} nodes, more than the {max_nodes} allowed")
        if len(self) and not 0 <= self.tokens.min() <= self.tokens.max() < vocab_size:
            raise DraftTreeError(f"a token lies outside the vocabulary of {vocab_size}")
        edges = set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        if len(edges) != len(self):
            raise DraftTreeError("two children of one node carry the same token")


EMPTY_TREE = DraftTree.chain([])
