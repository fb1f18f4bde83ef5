"""The Proposer protocol, through which the engine gets draft trees, and its argument types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree

NO_LOAD = Load()


class DraftLimits(NamedTuple):
    """The largest tree that a request may get in one step."""

    request_id: str
    max_nodes: int
    max_depth: int
    may_branch: bool = True
    """False: only a chain, because a branching tree of this request could not be verified."""
    context: int = 0
    """The number of committed tokens, to which every node attends."""


class Verified(NamedTuple):
    """The model's likeliest tokens at the roots and nodes verified in one step, accepted or not."""

    request_ids: Sequence[str]
    forest: DraftForest
    """The verified tree of each request: the first nodes of the proposed one. If `wants_roots`,
    requests for which no node was proposed are included."""
    at_roots: Int32s
    """int32 [t, k]: the likeliest tokens after each root, best first; k is `num_choices`."""
    at_nodes: Int32s
    """int32 [n, k]: the likeliest tokens after each node, best first. In a replay, UNKNOWN after
    nodes that were not accepted."""
    gaps: NDArray[np.float32]
    """float32 [t + n, k]: the difference between the best logit and each of these, roots first."""
    accepted: NDArray[np.bool_]
    """bool [n]: whether each node was accepted."""
    lengths: Int64s
    """int64 [t]: the number of accepted nodes of each tree."""

    @classmethod
    def nothing(cls, request_ids: Sequence[str], forest: DraftForest, num_choices: int) -> Verified:
        """A result without accepted nodes, with all tokens and gaps 0, for compiling kernels."""
        t, n = len(forest), forest.num_nodes
        return cls(
            request_ids,
            forest,
            np.zeros((t, num_choices), np.int32),
            np.zeros((n, num_choices), np.int32),
            np.zeros((t + n, num_choices), np.float32),
            np.zeros(n, np.bool_),
            np.zeros(t, np.int64),
        )


class Proposer(Protocol):
    """Grows draft trees. A request stays live until `finish`, even if calls leave it out."""

    cost: StepCost | None
    """The cost model of a step, set by the engine. While it is None, trees are not cut to the nodes
    that pay."""
    pays: bool
    """Whether the last trees were worth that their step waited for them."""
    num_choices: int
    """How many of the model's likeliest tokens at each node `observe` needs; 0 if it needs none.

    It may change from step to step, as `wants_roots` may."""
    wants_roots: bool
    """Whether `observe` also needs the root choices of requests without a node."""

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        proposer: str | None = None,
    ) -> None:
        """Start a request; one that is live already starts over.

        Parameters
        ----------
        request_id : str
        prompt : Sequence[int]
            Token ids, possibly none; UNKNOWN (`tree.py`) in place of embeddings.
        namespace : str or None
            The request learns from the answers of its namespace only; None shares with none.
        references : Sequence[Sequence[int]]
            Texts from which the answer is likely to copy.
        proposer : str or None
            "ngram_trie", "jacobi_window" or "hybrid", if it is another one than the server's
            "hybrid".
        """

    def extend(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Append newly committed output tokens to the requests, keyed by request id."""

    def observe(self, verified: Verified) -> None:
        """Learn from the model's choices in the step whose tokens `extend` has just received.

        Not called if `num_choices` is 0.
        """

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> Sequence[DraftTree]:
        """Return one tree, possibly empty, for each entry of `limits`, in order.

        `limits` has the requests of one step; `load` is the step's other work.
        """

    def finish(self, request_id: str) -> None:
        """End the request; an unknown one is ignored."""


class NoProposer:
    """Drafts nothing. Used on ranks that only verify rank 0's drafts."""

    cost: StepCost | None = None
    pays = False
    num_choices = 0
    wants_roots = False

    def start(self, request_id: str, prompt: Sequence[int], *rest: Any) -> None:
        """Do nothing."""

    def extend(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Do nothing."""

    def observe(self, verified: Verified) -> None:
        """Do nothing."""

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> Sequence[DraftTree]:
        """Return an empty tree for each request."""
        return [EMPTY_TREE] * len(limits)

    def finish(self, request_id: str) -> None:
        """Do nothing."""
