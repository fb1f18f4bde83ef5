"""What runner and scheduler send each other beside what vLLM has them send.

Drafts are made by one runner, the first of those that share a model. They go to the scheduler with
the output of the step that made them, and come back with the step in which they are verified, to
all runners. So every rank verifies the same trees, whatever its clock says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree


class SentDraft(NamedTuple):
    """A draft as it was proposed."""

    forest: DraftForest
    """All that were proposed in the same step."""
    place: int
    """Its place among them."""
    tokens: list[int]

    @property
    def tree(self) -> DraftTree:
        """The draft itself."""
        return self.forest[self.place]


class ProposedDrafts(NamedTuple):
    """What comes to the scheduler with `ModelRunnerOutput`."""

    drafts: Mapping[str, SentDraft]
    """By request id; also of requests that were not in the step, and wait with theirs."""
    req_ids: Sequence[str]
    """The requests of the step."""
    has_grammars: bool = False
    """Whether any live request is under a grammar."""
    min_prob_beside_prompt: float = 0.0
    """What a node's probability must be at least to pay in a step that reads a prompt too."""


class DraftsToVerify(NamedTuple):
    """What goes to every runner with `SchedulerOutput`."""

    req_ids: Sequence[str]
    """Requests whose drafts are verified in this step."""
    forest: DraftForest
    """Their drafts, in that order, as many nodes of each as were scheduled."""
    from_proposer: NDArray[np.bool_]
    """bool [t]: the trees that are the proposer's, and not a grammar's or what is left of them."""
    kept_blocks: Mapping[str, list[int]]
    """Requests that gave KV blocks back, and how many each still has in each KV cache group."""


NO_PROPOSALS = ProposedDrafts({}, ())
NO_DRAFTS_TO_VERIFY = DraftsToVerify((), DraftForest.of([]), np.empty(0, np.bool_), {})
_NOTHING_SENT = SentDraft(DraftForest.of([EMPTY_TREE]), 0, [])
_ATTRIBUTE = "lookahead"


def recall(
    scheduled: Mapping[str, list[int]],
    sent: Mapping[str, SentDraft],
    replacements: Mapping[str, DraftTree],
) -> tuple[DraftForest, NDArray[np.bool_]]:
    """The trees whose nodes were `scheduled`, possibly cut; a chain of what nobody knows.

    Also which ones are the proposer's: bool [t].

    Parameters
    ----------
    scheduled
        Tokens by request id.
    sent
        What was proposed; it is recognized by its tokens.
    replacements
        Trees that take the place of those.
    """
    drafts = [
        _NOTHING_SENT if req_id in replacements else sent.get(req_id, _NOTHING_SENT)
        for req_id in scheduled
    ]
    known = [d.tokens[: len(t)] == t for d, t in zip(drafts, scheduled.values(), strict=True)]
    from_proposer = np.array(known, np.bool_)
    if all(known) and len({id(draft.forest) for draft in drafts}) == 1:  # of one step, as a rule
        places = np.array([draft.place for draft in drafts])
        sizes = np.array([len(tokens) for tokens in scheduled.values()])
        return drafts[0].forest.take(places, sizes), from_proposer
    forest = DraftForest.of(
        [
            (d.tree if mine else replacements.get(req_id) or DraftTree.chain(t)).prefix(len(t))
            for d, mine, (req_id, t) in zip(drafts, known, scheduled.items(), strict=True)
        ]
    )
    return forest, from_proposer


def compile_recall() -> None:
    """Compile what `recall` calls, so that no request waits for the compiler."""
    recall({"": [0]}, {"": SentDraft(DraftForest.of([DraftTree.chain([0])]), 0, [0])}, {})


def attach(carrier: Any, what: ProposedDrafts | DraftsToVerify) -> None:
    """Send `what` along with an object of vLLM's."""
    setattr(carrier, _ATTRIBUTE, what)


def proposed(model_runner_output: Any) -> ProposedDrafts | None:
    """What came along with `ModelRunnerOutput`; None: the step made no drafts."""
    return getattr(model_runner_output, _ATTRIBUTE, None)


def to_verify(scheduler_output: Any) -> DraftsToVerify:
    """What came along with `SchedulerOutput`."""
    return getattr(scheduler_output, _ATTRIBUTE, NO_DRAFTS_TO_VERIFY)
