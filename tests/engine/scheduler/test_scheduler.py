"""Which requests get the drafts that the workers send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.messages import ProposedDrafts, SentDraft
from lookahead_vllm.engine.scheduler.scheduler import LookaheadScheduler


@pytest.mark.parametrize("has_grammars", [False, True])
def test_only_running_requests_get_drafts(has_grammars: bool) -> None:
    """vLLM may end the turn of a session for a reason that the drafter does not know."""

    def request(status: RequestStatus) -> Any:
        return SimpleNamespace(
            status=status,
            spec_token_ids=[],
            is_prefill_chunk=False,
            use_structured_output=False,
            is_finished=lambda: RequestStatus.is_finished(status),
        )

    scheduler: Any = object.__new__(LookaheadScheduler)
    scheduler._has_stages, scheduler._grammar_drafts = False, {}
    scheduler.structured_output_manager = SimpleNamespace(validate_tokens=lambda _, tokens: tokens)
    scheduler.requests = {
        "running": request(RequestStatus.RUNNING),
        "next turn": request(RequestStatus.WAITING),
        "idle session": request(RequestStatus.WAITING_FOR_STREAMING_REQ),
        "ended": request(RequestStatus.FINISHED_STOPPED),
    }
    req_ids = [*scheduler.requests, "unknown"]
    forest = DraftForest.of([DraftTree.chain([7, 8])] * len(req_ids))
    sent = {req_id: SentDraft(forest, i, [7, 8]) for i, req_id in enumerate(req_ids)}
    scheduler._take_drafts(ProposedDrafts(sent, req_ids, has_grammars, 0.0))
    drafted = {req_id for req_id, own in scheduler.requests.items() if own.spec_token_ids}
    assert drafted == {"running"}
