"""Drives a proposer without an engine: reads tokens, and drafts from all that was read.

For replays, for texts from which a cache learns, and for tests. An engine drafts before it learns
from the tokens of the last step; here, `read` has learned from them before `draft_trees`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import (
    NO_CHAINS,
    NOTHING_EMITTED,
    NOTHING_WANTED,
    EmittedTokens,
    ProgressArrays,
    WantedDrafts,
)
from lookahead_vllm.draft.proposers.proposer import NO_LOAD, Proposer
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.verified import Verified

ENDLESS = 1 << 40
"""More tokens than any request has."""


class DraftLimits(NamedTuple):
    """The largest tree that a request may get."""

    request_id: str
    max_nodes: int
    max_depth: int
    may_branch: bool = True
    context: int = 0
    """The number of committed tokens, to which every node attends."""


def read(
    proposer: Proposer,
    tokens: Mapping[str, Sequence[int]],
    verified: Verified | None = None,
    chains: Int32s = NO_CHAINS,
) -> None:
    """Let a proposer learn from the tokens that its requests have emitted in a step.

    Parameters
    ----------
    tokens
        By request id.
    verified
        The model's choices in this step.
    chains : int32 [t, K, NUM_ALTERNATIVES, 2]
        What a trained drafter proposes after the tokens of each request.
    """
    counts = np.array([len(new) for new in tokens.values()], np.int32)
    padded = np.zeros((len(counts), counts.max(initial=1)), np.int64)
    for row, new in zip(padded, tokens.values(), strict=True):
        row[: len(new)] = new
    progress = _progress_of(proposer, list(tokens), np.full(len(counts), ENDLESS))
    emitted = EmittedTokens(np.arange(len(counts)), padded, counts, chains)
    proposer.plan((), NOTHING_WANTED, np.empty(0, np.int64), NO_LOAD, verified)
    _draft(proposer, progress, emitted, NOTHING_WANTED)
    proposer.learn()


def draft_trees(
    proposer: Proposer, limits: Sequence[DraftLimits], load: Load = NO_LOAD
) -> DraftForest:
    """A tree for each entry of `limits`, in order, possibly empty; `load` is the other work."""
    request_ids = [limit.request_id for limit in limits]
    nodes, depths, contexts = (
        np.array([limit[field] for limit in limits], np.int64) for field in (1, 2, 4)
    )
    may_branch = np.array([limit.may_branch for limit in limits], np.bool_)
    progress = _progress_of(proposer, request_ids, depths + 1)
    wanted = WantedDrafts(np.arange(len(limits)), nodes, may_branch)
    proposer.plan(request_ids, wanted, contexts, load, None)
    forest = _draft(proposer, progress, NOTHING_EMITTED, wanted)
    proposer.learn()
    return forest


def _progress_of(
    proposer: Proposer, request_ids: Sequence[str], remaining: Int64s
) -> ProgressArrays:
    """A row for each request, which may emit so many tokens more; int64 [t]."""
    t = len(request_ids)
    return ProgressArrays(
        np.array([proposer.text_of(i) for i in request_ids], np.int64),
        np.zeros(t, np.int64),
        np.zeros(t, np.int64),
        remaining,
        np.ones(t, np.bool_),
        np.empty((t, 0), np.int32),
    )


def _draft(
    proposer: Proposer, progress: ProgressArrays, emitted: EmittedTokens, wanted: WantedDrafts
) -> DraftForest:
    return proposer.draft(progress, emitted, emitted.new_spans(), wanted, ENDLESS)[0]
