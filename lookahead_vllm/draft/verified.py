"""What the model chose at the nodes of a step, for proposers that learn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.tree import DraftForest


class Verified(NamedTuple):
    """The model's likeliest tokens at the roots and nodes verified in one step, accepted or not."""

    request_ids: Sequence[str]
    forest: DraftForest
    """The verified tree of each request: the first nodes of the proposed one. Requests for which no
    node was proposed are included."""
    tokens: Int32s
    """int32 [m, k]: the likeliest tokens at each row of logits, best first; k is `num_choices`. In
    a replay, UNKNOWN after nodes that were not accepted."""
    gaps: NDArray[np.float32]
    """float32 [m, k]: the difference between the best logit and each of these."""
    roots: Int64s
    """int64 [t]: the row of each root. Its nodes' rows follow, in order."""
    accepted: NDArray[np.bool_]
    """bool [n]: whether each node was accepted."""

    @classmethod
    def nothing(cls, request_ids: Sequence[str], forest: DraftForest, num_choices: int) -> Verified:
        """A result without accepted nodes, with all tokens and gaps 0, for compiling kernels."""
        t, n = len(forest), forest.num_nodes
        return cls(
            request_ids,
            forest,
            np.zeros((t + n, num_choices), np.int32),
            np.zeros((t + n, num_choices), np.float32),
            forest.firsts[:-1] + np.arange(t),
            np.zeros(n, np.bool_),
        )
