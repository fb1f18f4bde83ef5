"""What the draft limiter counts as plain work, without an engine."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from lookahead_vllm.engine.scheduler.draft_limits import (
    RECHECK_AFTER_STEPS,
    DraftLimiter,
    _largest,
)


def test_sessions_without_input_do_not_start_in_a_step() -> None:
    def request(status: RequestStatus) -> Any:
        return SimpleNamespace(
            status=status, num_tokens=600, num_output_placeholders=0, num_computed_tokens=0
        )

    new, idle = request(RequestStatus.WAITING), request(RequestStatus.WAITING_FOR_STREAMING_REQ)
    limiter: Any = object.__new__(DraftLimiter)
    limiter._drafter_tokens = 0
    limiter._scheduler = SimpleNamespace(
        running=[],
        kv_holding_waiting=[idle],
        waiting=[idle, new],
        max_num_active_reqs=8,
        max_num_scheduled_tokens=1000,
    )
    assert list(limiter._admissible()) == [new]


def waiting_request(num_tokens: int) -> Any:
    return SimpleNamespace(
        request_id=str(num_tokens),
        status=RequestStatus.WAITING,
        lora_request=None,
        num_tokens=num_tokens,
        num_output_placeholders=0,
        num_computed_tokens=0,
    )


def limiter_with_free_blocks(free: int) -> Any:
    """Of a scheduler with blocks of 10 tokens, and no running request."""
    limiter: Any = object.__new__(DraftLimiter)
    pool = SimpleNamespace(get_num_free_blocks=lambda: pool.free, free=free)
    limiter._scheduler = SimpleNamespace(
        running=[], kv_cache_manager=SimpleNamespace(block_pool=pool, watermark_blocks=1)
    )
    limiter._managers = [SimpleNamespace(block_size=10, req_to_blocks=defaultdict(list))]
    limiter._spare_blocks, limiter._chain_length = [0], 0
    limiter._refused, limiter._refused_with, limiter._refused_steps = None, 0, 0
    limiter.pool = pool
    return limiter


def test_a_request_is_refused_until_blocks_are_freed() -> None:
    limiter, head = limiter_with_free_blocks(5), waiting_request(41)
    assert not limiter._is_refused(head, 100)  # it may start: its prefix may be cached
    assert limiter._is_refused(head, 100)
    limiter.pool.free = 3
    assert limiter._is_refused(head, 100)
    limiter.pool.free = 5
    assert limiter._is_refused(head, 100)
    assert not limiter._is_refused(waiting_request(60), 100)  # another one
    assert not limiter._is_refused(head, 100)
    limiter.pool.free = 6
    assert not limiter._is_refused(head, 100)
    assert not limiter._is_refused(head, 100)  # it fits: it waits for something else than blocks


def test_a_request_that_waits_for_something_else_is_not_refused() -> None:
    for other, free_tokens in (
        (dict(status=RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR), 100),
        (dict(lora_request="an adapter"), 100),
        ({}, 0),
    ):
        limiter, head = limiter_with_free_blocks(5), waiting_request(41)
        vars(head).update(other)
        assert not any(limiter._is_refused(head, free_tokens) for _ in range(3))


def test_a_refused_request_may_start_now_and_then() -> None:
    limiter, head = limiter_with_free_blocks(5), waiting_request(41)
    for _ in range(3):
        assert not limiter._is_refused(head, 100)
        assert all(limiter._is_refused(head, 100) for _ in range(RECHECK_AFTER_STEPS))


@given(st.integers(0, 70), st.integers(-1, 80))
def test_the_largest_number_that_fits(most: int, limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert _largest(most, fits) == max(min(most, limit), 0)
    assert len(tried) <= 8


def test_a_drafter_that_needs_a_token_of_each_request_is_charged() -> None:
    """vLLM reserves it, so drafts that took it would leave nothing for the last prompt."""
    limiter = limiter_with_free_blocks(9)
    requests = [waiting_request(5), waiting_request(7)]
    for tokens, charged in ((0, 12), (1, 14)):
        limiter._drafter_tokens = tokens
        assert limiter._charge(requests) == charged
