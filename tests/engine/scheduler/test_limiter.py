"""What the draft limiter counts as plain work, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from lookahead_vllm.engine.scheduler.draft_limits import DraftLimiter, _largest


def test_sessions_without_input_do_not_start_in_a_step() -> None:
    def request(status: RequestStatus) -> Any:
        return SimpleNamespace(
            status=status, num_tokens=600, num_output_placeholders=0, num_computed_tokens=0
        )

    new, idle = request(RequestStatus.WAITING), request(RequestStatus.WAITING_FOR_STREAMING_REQ)
    limiter: Any = object.__new__(DraftLimiter)
    limiter._scheduler = SimpleNamespace(
        running=[],
        kv_holding_waiting=[idle],
        waiting=[idle, new],
        max_num_active_reqs=8,
        max_num_scheduled_tokens=1000,
    )
    assert list(limiter._admissible()) == [new]


@given(st.integers(0, 70), st.integers(-1, 80))
def test_the_largest_number_that_fits(most: int, limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert _largest(most, fits) == max(min(most, limit), 0)
    assert len(tried) <= 8
