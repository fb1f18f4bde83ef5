"""Messages between runner and scheduler, attached to objects that vLLM sends.

Rank 0 makes the drafts. They go to the scheduler with the output of the step that made them, and
from there to all ranks with the step that verifies them. So every rank verifies the same trees,
independent of its own timings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import DraftTokenIds

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree


class SentDraft(NamedTuple):
    """A draft as it was proposed."""

    forest: DraftForest
    """All drafts that were proposed in the same step."""
    place: int
    """The draft's index in `forest`."""
    tokens: list[int]

    @property
    def tree(self) -> DraftTree:
        """The draft's tree, of which `tokens` are the tokens."""
        return self.forest[self.place]


class ProposedDrafts(NamedTuple):
    """Attached to `ModelRunnerOutput`: the drafts for the next steps."""

    drafts: Mapping[str, SentDraft]
    """By request id; also of requests that were not in the step, which keep their drafts."""
    req_ids: Sequence[str]
    """The requests of the step."""
    has_grammars: bool = False
    """Whether any live request has a grammar."""
    min_prob_beside_prompt: float = 0.0
    """The smallest probability at which a node is worth its cost in a step that also computes a
    prompt."""
    max_step_nodes: int = sys.maxsize
    """The most nodes of a step; its logits have a row for each."""


class DraftsToVerify(NamedTuple):
    """Attached to `SchedulerOutput`: the drafts of the step."""

    req_ids: Sequence[str]
    """Requests whose drafts are verified in this step."""
    forest: DraftForest
    """Their drafts, in the order of `req_ids`, each cut to the nodes that were scheduled."""
    from_proposer: NDArray[np.bool_]
    """bool [t]: which trees are the proposer's. The others were changed by a grammar, or are chains
    of tokens whose tree is unknown."""
    kept_blocks: Mapping[str, list[int]]
    """For requests that gave KV blocks back, by id: the number of blocks that they keep in each KV
    cache group."""


class LateReport(NamedTuple):
    """Attached to `ModelRunnerOutput` under late drafting: how many slots were filled, and whether
    drafts pay."""

    sizes: Mapping[str, int]
    """The number of nodes that were sent, by request id."""
    pays: bool
    """Whether drafts are worth their cost now, so that the scheduler should reserve slots."""


NO_PROPOSALS = ProposedDrafts({}, ())
NO_DRAFTS_TO_VERIFY = DraftsToVerify((), DraftForest.of([]), np.empty(0, np.bool_), {})
_NOTHING_SENT = SentDraft(DraftForest.of([EMPTY_TREE]), 0, [])
_ATTRIBUTE = "lookahead"
_PAUSE = "lookahead_pause"


def recall(
    scheduled: Mapping[str, list[int]],
    sent: Mapping[str, SentDraft],
    replacements: Mapping[str, DraftTree],
) -> tuple[DraftForest, NDArray[np.bool_]]:
    """The trees of the tokens in `scheduled`; a chain where no tree has these tokens.

    Parameters
    ----------
    scheduled
        Tokens by request id: a tree's nodes, possibly without the last ones.
    sent
        Proposed drafts by request id. One whose first tokens differ is not used.
    replacements
        Trees that are used instead of proposed ones.

    Returns
    -------
    DraftForest
        One tree for each entry of `scheduled`.
    bool [t]
        Which trees are from `sent`.
    """
    drafts = [
        _NOTHING_SENT if req_id in replacements else sent.get(req_id, _NOTHING_SENT)
        for req_id in scheduled
    ]
    matches = [d.tokens[: len(t)] == t for d, t in zip(drafts, scheduled.values(), strict=True)]
    from_proposer = np.array(matches, np.bool_)
    if all(matches) and len({id(draft.forest) for draft in drafts}) == 1:  # the common case
        places = np.array([draft.place for draft in drafts])
        sizes = np.array([len(tokens) for tokens in scheduled.values()])
        return drafts[0].forest.take(places, sizes), from_proposer
    forest = DraftForest.of(
        [
            (d.tree if match else replacements.get(req_id) or DraftTree.chain(t)).prefix(len(t))
            for d, match, (req_id, t) in zip(drafts, matches, scheduled.items(), strict=True)
        ]
    )
    return forest, from_proposer


def compile_recall() -> None:
    """Compile the kernels that `recall` calls, so that no request waits for the compiler."""
    recall({"": [0]}, {"": SentDraft(DraftForest.of([DraftTree.chain([0, 0])]), 0, [0, 0])}, {})


def attach(
    carrier: Any, message: ProposedDrafts | DraftsToVerify | LateReport | DraftForest
) -> None:
    """Attach `message` to a `ModelRunnerOutput`, a `SchedulerOutput` or a `DraftTokenIds`."""
    setattr(carrier, _ATTRIBUTE, message)


def proposed(model_runner_output: Any) -> ProposedDrafts | None:
    """The message of the runner; None if the step made no drafts."""
    return getattr(model_runner_output, _ATTRIBUTE, None)


def late_report(model_runner_output: Any) -> LateReport | None:
    """The message of the second runner; None from a rank that does not draft."""
    return getattr(model_runner_output, _ATTRIBUTE, None)


def drafts_of(req_ids: Sequence[str], forest: DraftForest) -> DraftTokenIds:
    """The drafts of the step in flight, with their trees."""
    drafts = DraftTokenIds(list(req_ids), [tree.tokens.tolist() for tree in forest])
    attach(drafts, forest)
    return drafts


def forest_of(drafts: DraftTokenIds) -> DraftForest:
    """The trees of `drafts_of`."""
    forest: DraftForest = getattr(drafts, _ATTRIBUTE)
    return forest


def attach_pause(scheduler_output: Any, seconds: float) -> None:
    """Send the time in which the engine did not run since the step before."""
    setattr(scheduler_output, _PAUSE, seconds)


def pause_before(scheduler_output: Any) -> float:
    """The seconds in which the engine did not run since the step before."""
    seconds: float = getattr(scheduler_output, _PAUSE, 0.0)
    return seconds


def to_verify(scheduler_output: Any) -> DraftsToVerify:
    """The message of the scheduler."""
    return getattr(scheduler_output, _ATTRIBUTE, NO_DRAFTS_TO_VERIFY)
