"""Drafts take no tokens of a step and no KV blocks from any request."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import LLM
from vllm.v1.request import RequestStatus

from lookahead_vllm.engine.scheduler.draft_limits import (
    RECHECK_AFTER_STEPS,
    DraftLimiter,
    _largest,
)
from tests.support.driving import drafter_of, engine, generate, of_length, random_prompts
from tests.support.proposers import record

BLOCK = 32  # the smallest that vLLM has on CPU
ANSWER = of_length(44)
Step = dict[str, int]


def watch(llm: LLM) -> tuple[list[Step], list[int], list[str]]:
    """Each step's plain tokens by request, each step's nodes, and the preempted requests."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    steps: list[Step] = []
    nodes: list[int] = []
    preempted: list[str] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens
        steps.append(
            {
                request_id.split("-")[0]: tokens - len(drafts.get(request_id, ()))
                for request_id, tokens in output.num_scheduled_tokens.items()
            }
        )
        nodes.append(sum(map(len, drafts.values())))
        return output

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id.split("-")[0])
        return preempt(request, *args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = watched, count
    return steps, nodes, preempted


def run(
    llama: Path, lookahead: dict[str, Any] | None, prompts: Sequence[list[int]], **settings: Any
) -> tuple[Any, list[Step], list[int], list[str], Any]:
    settings = dict(block_size=BLOCK, max_model_len=128) | settings
    with engine(llama, lookahead, **settings) as llm:
        steps, nodes, preempted = watch(llm)
        answers = generate(llm, prompts, ANSWER)
        counters = drafter_of(llm).counters if lookahead else None
    return answers, steps, nodes, preempted, counters


WRONG = {"proposer": "always_wrong", "num_speculative_tokens": 16}
HIDDEN = {"proposer": "hidden_path", "num_speculative_tokens": 16}
PROMPTS = [prompt[:20] for prompt in random_prompts(6, 40, seed=3) if len(prompt) >= 20]
NEED = len(PROMPTS) * -(-(20 + 44) // BLOCK) + 1
"""The fewest blocks with which plain vLLM preempts no request, and its null block."""


def test_lookahead_needs_no_more_blocks_than_plain_vllm(llama):
    expected, _, _, plain, _ = run(llama, None, PROMPTS, num_gpu_blocks_override=NEED)
    *_, fewer, _ = run(llama, None, PROMPTS, num_gpu_blocks_override=NEED - 1)
    assert not plain and fewer
    record(PROMPTS, expected)
    for proposer in (WRONG, HIDDEN):
        answers, _, nodes, preempted, counters = run(
            llama, proposer, PROMPTS, num_gpu_blocks_override=NEED
        )
        assert answers == expected
        assert not preempted
        assert counters.branching_trees > 20 and sum(nodes) > 100


TIGHT = {
    "few tokens a step": dict(max_num_batched_tokens=16, max_num_seqs=8),
    "few blocks": dict(num_gpu_blocks_override=NEED - 3),
    "both": dict(num_gpu_blocks_override=NEED - 2, max_num_batched_tokens=20),
}


@pytest.mark.parametrize("settings", TIGHT.values(), ids=TIGHT)
def test_the_schedule_without_its_drafts_is_plain_vllms(settings, llama):
    """Step by step and token by token, where no draft is ever right."""
    prompts = [*PROMPTS, *random_prompts(6, 60, seed=4)]
    expected, plain, _, plain_preempted, _ = run(llama, None, prompts, **settings)
    record(prompts, expected)
    answers, steps, nodes, preempted, counters = run(llama, WRONG, prompts, **settings)
    assert answers == expected
    assert counters.accepted_nodes == 0 and sum(nodes) > 0
    assert preempted == plain_preempted
    assert steps == plain


FULL = dict(num_gpu_blocks_override=4, max_model_len=96, max_num_batched_tokens=64)
"""One request needs all three blocks, and a prompt of 70 tokens takes all tokens of a step."""
LONG = [*PROMPTS[0], *PROMPTS[1], *PROMPTS[2], *PROMPTS[3][:10]]


def test_a_waiting_request_without_blocks_takes_no_tokens_from_drafts(llama):
    prompts = [PROMPTS[0], LONG, LONG[::-1]]
    expected, plain, *_ = run(llama, None, prompts, **FULL)
    record(prompts, expected)
    for proposer in (WRONG, HIDDEN):
        answers, steps, nodes, preempted, _ = run(llama, proposer, prompts, **FULL)
        assert answers == expected and not preempted
        first, second = list(dict.fromkeys(request for step in steps for request in step))[:2]
        alone = next(number for number, step in enumerate(steps) if second in step)
        assert all(set(step) <= {first} for step in steps[:alone])
        assert sum(nodes[:alone]) > 10
        if proposer is WRONG:
            assert steps == plain


# ---- what counts as plain work, without an engine ------------------------------------------------


def test_sessions_without_input_do_not_start_in_a_step():
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


def test_a_request_is_refused_until_blocks_are_freed():
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


def test_a_request_that_waits_for_something_else_is_not_refused():
    for other, free_tokens in (
        (dict(status=RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR), 100),
        (dict(lora_request="an adapter"), 100),
        ({}, 0),
    ):
        limiter, head = limiter_with_free_blocks(5), waiting_request(41)
        vars(head).update(other)
        assert not any(limiter._is_refused(head, free_tokens) for _ in range(3))


def test_a_refused_request_may_start_now_and_then():
    limiter, head = limiter_with_free_blocks(5), waiting_request(41)
    for _ in range(3):
        assert not limiter._is_refused(head, 100)
        assert all(limiter._is_refused(head, 100) for _ in range(RECHECK_AFTER_STEPS))


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(-1, 80))
def test_the_largest_number_that_fits(most, limit):
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert _largest(most, fits) == max(min(most, limit), 0)
    assert len(tried) <= 8


def test_a_drafter_that_needs_a_token_of_each_request_is_charged():
    """vLLM reserves it, so drafts that took it would leave nothing for the last prompt."""
    limiter = limiter_with_free_blocks(9)
    requests = [waiting_request(5), waiting_request(7)]
    for tokens, charged in ((0, 12), (1, 14)):
        limiter._drafter_tokens = tokens
        assert limiter._charge(requests) == charged
