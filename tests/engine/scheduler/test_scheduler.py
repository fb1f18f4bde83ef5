"""The scheduler: what it tells the workers, and what its slots take."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lookahead_vllm.engine import messages
from lookahead_vllm.engine.grammar import tree_walk as grammar
from lookahead_vllm.engine.scheduler.scheduler import PAUSE_AFTER_STEPS, LookaheadScheduler
from lookahead_vllm.options import request as request_options
from lookahead_vllm.options.request import RequestOptions
from tests.support.late_steps import BLOCK, LateSteps, random_arrivals, request

SLOTS = {"num_speculative_tokens": 16, "budget": 16}


@pytest.mark.parametrize("blocks", [18, 24])
@pytest.mark.parametrize("seed", range(3))
def test_slots_delay_no_request_by_more_than_a_step(seed, blocks, llama):
    """Requests need more blocks than there are, and no draft is ever right."""
    runs = [LateSteps(llama, blocks, options, max_model_len=64) for options in (None, SLOTS)]
    for run in runs:
        run.run(random_arrivals(random.Random(seed), 56, 30))
    plain, late = runs
    assert plain.preempted and late.num_slots > 100
    assert late.admitted.keys() == late.ended.keys() == plain.ended.keys()
    assert all(late.admitted[i] <= step + 1 for i, step in plain.admitted.items())
    assert all(late.ended[i] <= step + 1 for i, step in plain.ended.items())
    assert late.preempted == plain.preempted


@pytest.mark.parametrize("seed", range(2))
def test_accepted_drafts_in_few_blocks_make_a_server_faster(seed, llama):
    """No step in flight writes to a block that belongs to another request, see `LateSteps`."""
    plain = LateSteps(llama, 24, max_model_len=64)
    plain.run(random_arrivals(random.Random(seed), 60, 30))
    rng = random.Random(seed)
    late = LateSteps(llama, 24, SLOTS, lambda slots: rng.randrange(slots + 1), max_model_len=64)
    late.run(random_arrivals(random.Random(seed), 60, 30))
    assert late.admitted.keys() == plain.admitted.keys()
    assert len(late.scheduled) < 0.9 * len(plain.scheduled)


def test_a_pause_of_drafting_gives_all_blocks_back(llama):
    steps = LateSteps(llama, 12, {"num_speculative_tokens": 16}, max_model_len=64)
    steps.pays = False
    steps.scheduler.add_request(request("first", 2, 40))
    steps.run_until(lambda: steps.scheduler._empty_steps >= PAUSE_AFTER_STEPS)
    steps.step()
    now, length = len(steps.scheduled), steps.scheduler.requests["first"].num_tokens
    blocks = 12 - -(-(length + 2) // BLOCK)  # the first request may need the others in this step
    steps.scheduler.add_request(request("second", blocks * BLOCK, 1))
    steps.step()
    assert steps.scheduled[now] >= {"first"}
    assert steps.admitted["second"] == now


def test_a_session_without_input_keeps_no_blocks_of_rejected_drafts(llama):
    steps = LateSteps(llama, 12, SLOTS, max_model_len=64)
    scheduler = steps.scheduler
    scheduler.add_request(request("session", 5, 9, resumable=True))
    steps.run_until(lambda: scheduler.num_waiting_for_streaming_input == 1)
    scheduler.add_request(request("other", 8 * BLOCK - 2, 2))  # the session needs four
    now = len(steps.scheduled)
    steps.run_until(lambda: "other" in steps.admitted)
    assert steps.admitted["other"] <= now + 1  # the session's last step may still run
    steps.run_until(lambda: "other" not in scheduler.requests)
    scheduler.add_request(request("session", 5, 9, resumable=True))
    steps.run_until(lambda: scheduler.num_waiting_for_streaming_input == 0)
    steps.run_until(lambda: scheduler.num_waiting_for_streaming_input == 1)


@pytest.mark.parametrize("accept_all", [False, True])
def test_slots_leave_room_before_max_model_len(accept_all, llama):
    """Each request is in every step in which plain vLLM has it, until its last position."""
    runs = [
        LateSteps(llama, 64, options, lambda slots: slots * accept_all, max_model_len=40)
        for options in (None, SLOTS)
    ]
    for run in runs:
        run.run({0: [request("a", 10, 30)], 4: [request("b", 21, 19), request("c", 3, 37)]})
    plain, late = runs
    assert late.num_slots
    if accept_all:
        assert len(late.scheduled) < len(plain.scheduled) / 2
    else:
        assert late.scheduled == plain.scheduled


def test_a_request_that_is_preempted_in_a_step_keeps_no_blocks_in_it(monkeypatch):
    """It gave blocks back before vLLM preempted it; the workers do not have it any more."""
    output = SimpleNamespace(
        scheduled_new_reqs=[], preempted_req_ids={"preempted"}, total_num_scheduled_tokens=1
    )
    monkeypatch.setattr(AsyncScheduler, "schedule", lambda self: output)
    scheduler: Any = object.__new__(LookaheadScheduler)
    scheduler._may_pause, scheduler.running, scheduler.max_num_scheduled_tokens = False, [], 10
    scheduler._most_slots = 4
    scheduler._decode_steps = SimpleNamespace(schedule=lambda: None)
    kept = {"preempted": [1], "other": [2]}
    scheduler._draft_limiter = SimpleNamespace(cut=lambda: dict(kept))
    assert messages.kept_blocks(scheduler.schedule()) == {"other": [2]}
    output.preempted_req_ids = None
    assert messages.kept_blocks(scheduler.schedule()) == kept


def test_adding_a_request_takes_no_longer_beside_many_that_turned_lookahead_off(monkeypatch):
    dropped: list[int] = []

    class Known(set[str]):
        def __iand__(self, live: Any) -> Any:
            dropped.append(len(self))
            return Known(self & set(live))

    def add(scheduler: Any, request: Any) -> None:
        scheduler.requests[request.request_id] = request

    monkeypatch.setattr(AsyncScheduler, "add_request", add)
    scheduler: Any = object.__new__(LookaheadScheduler)
    scheduler.requests, scheduler._without_drafts = {}, Known()
    scheduler._continued = SimpleNamespace(start=lambda request: None)
    given = request_options.fields_for_worker({}, RequestOptions(enabled=False))
    params = SimpleNamespace(extra_args=given)
    for turn in range(2):
        for i in range(500):
            name = f"{turn} {i}"
            scheduler.add_request(
                SimpleNamespace(request_id=name, sampling_params=params, spec_decode_metrics=None)
            )
        scheduler.requests.clear()
    assert scheduler._without_drafts >= {f"1 {i}" for i in range(500)}
    assert len(scheduler._without_drafts) < 700 and len(dropped) == 1


def test_slots_that_were_all_left_empty_are_no_draft_in_a_requests_metrics(monkeypatch):
    def add(scheduler: Any, request: Any) -> None:
        request.spec_decode_metrics = RequestSpecDecodeMetrics.new(scheduler.num_spec_tokens)

    monkeypatch.setattr(AsyncScheduler, "add_request", add)
    scheduler: Any = object.__new__(LookaheadScheduler)
    scheduler.num_spec_tokens, scheduler.requests, scheduler._without_drafts = 4, {}, set()
    scheduler._continued = SimpleNamespace(start=lambda request: None)
    params = SimpleNamespace(extra_args=None)
    request: Any = SimpleNamespace(request_id="r", sampling_params=params, spec_decode_metrics=None)
    scheduler.add_request(request)
    metrics = request.spec_decode_metrics
    for drafted, accepted in ((0, 0), (3, 2), (0, 0), (1, 0)):
        metrics.observe(num_draft_tokens=drafted, num_accepted=accepted, detailed=True)
    sent = MsgpackEncoder().encode(EngineCoreOutput("r", [1], spec_decode_metrics=metrics))
    received = MsgpackDecoder(EngineCoreOutput).decode(sent).spec_decode_metrics
    assert received.histogram == [1, 0, 1, 0, 0] and received.num_draft_tokens == 4
    assert received.per_step_drafted == [3, 1] and received.per_step_accepted == [2, 0]


@pytest.mark.parametrize(
    ("is_033", "longest", "rows"), [(False, 64, [3, 1]), (True, 64, [4, 4]), (True, 2, [3, 3])]
)
def test_masks_are_no_more_than_the_drafts_of_a_step_need(is_033, longest, rows, monkeypatch):
    """From vLLM 0.33 on, all requests have equally many, one of a few numbers."""
    monkeypatch.setattr(grammar, "EQUALLY_MANY_MASKS", is_033)
    scheduler: Any = object.__new__(LookaheadScheduler)
    scheduler.num_spec_tokens = longest
    own = SimpleNamespace(
        use_structured_output=True, is_prefill_chunk=False, is_finished=lambda: False
    )
    scheduler.requests = {"drafted": own, "plain": own}
    scheduler._masks = {"drafted": np.ones((3, 2), np.int32)}
    scheduler._fill_masks = lambda *_: np.full((1, 2), 7, np.int32)
    step: Any = SimpleNamespace(
        has_structured_output_requests=True, num_scheduled_tokens={"drafted": 3, "plain": 1}
    )
    output = scheduler.get_grammar_bitmask(step)
    masks = np.split(output.grammar_bitmask, np.cumsum(rows)[:-1])
    assert [len(own) for own in masks] == rows
    assert (masks[0][:3] == 1).all() and (masks[1][:1] == 7).all()
