"""The scheduler of late drafts: what it tells the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from lookahead_vllm.engine import messages
from lookahead_vllm.engine.scheduler.late_scheduler import LateDraftScheduler


def test_a_request_that_is_preempted_in_a_step_keeps_no_blocks_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gave blocks back before vLLM preempted it; the workers do not have it any more."""
    output = SimpleNamespace(scheduled_new_reqs=[], preempted_req_ids={"preempted"})
    monkeypatch.setattr(AsyncScheduler, "schedule", lambda self: output)
    scheduler: Any = object.__new__(LateDraftScheduler)
    scheduler._may_pause, scheduler.running, scheduler.max_num_scheduled_tokens = False, [], 10
    kept = {"preempted": [1], "other": [2]}
    scheduler._draft_limiter = SimpleNamespace(cut=lambda *args: dict(kept))
    assert messages.to_verify(scheduler.schedule()).kept_blocks == {"other": [2]}
    output.preempted_req_ids = None
    assert messages.to_verify(scheduler.schedule()).kept_blocks == kept
