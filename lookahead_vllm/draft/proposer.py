"""Who guesses: the interface that the engine calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree

NO_LOAD = Load()


class RequestOverrides(NamedTuple):
    """What one request wants otherwise than the server's options say; None is no wish.

    `proposer` is "ngram_trie", "jacobi_window" or "hybrid", on a server whose proposer is hybrid.
    """

    proposer: str | None = None
    window_size: int | None = None
    ngram_size: int | None = None
    guess_set_size: int | None = None
    pool_from_prompt: bool | None = None


NO_OVERRIDES = RequestOverrides()


class DraftLimits(NamedTuple):
    """How large a tree one request may get."""

    request_id: str
    max_nodes: int
    max_depth: int
    may_branch: bool = True
    """False: a chain, because this request's tree could not be verified."""
    context: int = 0
    """Committed tokens, which every node attends to."""


class Verified(NamedTuple):
    """What the model said of the drafts of one step: its likeliest tokens, accepted or not."""

    request_ids: Sequence[str]
    forest: DraftForest
    """The first nodes of what was proposed for each of these requests; where `wants_roots`, also of
    those that were proposed nothing."""
    at_roots: Int32s
    """int32 [t, k]: the likeliest tokens after each root, best first; k is `num_choices`."""
    at_nodes: Int32s
    """int32 [n, k]: and after each node."""
    gaps: NDArray[np.float32]
    """float32 [t + n, k]: how far each logit is below the best one, roots first."""
    accepted: NDArray[np.bool_]
    """bool [n]: the nodes that became output."""
    lengths: Int64s
    """int64 [t]: how many each tree has of those."""

    @classmethod
    def nothing(cls, request_ids: Sequence[str], forest: DraftForest, num_choices: int) -> Verified:
        """No node was accepted, and the model said 0 everywhere: to try a proposer out."""
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
    """What the engine calls. A request may be absent from any number of calls: that is no end."""

    cost: StepCost | None
    """What a step costs; None while it is not known, and then no tree is cut."""
    min_prob_beside_prompt: float
    """What a node's probability must be to pay in a step that reads a prompt as well."""
    num_choices: int
    """How many of the model's likeliest tokens at each node `observe` wants to hear of."""
    wants_roots: bool
    """Whether it wants to hear of requests without a node, too."""

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        overrides: RequestOverrides = NO_OVERRIDES,
    ) -> None:
        """A request begins; one that is already known begins anew.

        `prompt` has UNKNOWN (`tree.py`) in the places of embeddings, and may be empty.
        Requests of one `namespace` learn from each other's answers, and from no others; None
        shares with nobody. `references` are texts that this request's answer may copy from.
        """

    def extend(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """The next output tokens of some requests, in order, as they are committed."""

    def observe(self, verified: Verified) -> None:
        """What the model said at the nodes of the step whose tokens came with `extend` just now.

        Not called where `num_choices` is 0.
        """

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> Sequence[DraftTree]:
        """One tree, possibly empty, for each of `limits`: the requests of one step.

        `load` is what the step has to do beside those of `limits`.
        """

    def finish(self, request_id: str) -> None:
        """The request has ended; an unknown one is ignored."""


class NoProposer:
    """Guesses nothing and learns nothing: who proposes where another one's drafts are verified."""

    cost: StepCost | None = None
    min_prob_beside_prompt = 0.0
    num_choices = 0
    wants_roots = False

    def start(self, request_id: str, prompt: Sequence[int], *more: Any) -> None:
        """Pass over it."""

    def extend(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Pass over them."""

    def observe(self, verified: Verified) -> None:
        """Pass over it."""

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> Sequence[DraftTree]:
        """No node for anybody."""
        return [EMPTY_TREE] * len(limits)

    def finish(self, request_id: str) -> None:
        """Pass over it."""
