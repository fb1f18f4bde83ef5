"""What counts as the time of a step: from its launch to the next, unless requests had to come."""

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm import LLM, TokensPrompt

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost, StepWork
from lookahead_vllm.engine.drafter import drafter
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.drafter.recorder import StepRecorder
from tests.support.driving import GREEDY, drafter_of, engine, runner_of

PAUSE = 1e6
"""Seconds by which the clocks are set forward."""


class Clock:
    """Stands in for the clock of the worker."""

    def __init__(self, llm: LLM) -> None:
        self._ahead = 0.0
        self.core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        runner_of(llm)._clock = self

    def __call__(self) -> float:
        return time.perf_counter() + self._ahead

    def advance(self) -> None:
        self._ahead += PAUSE

    def advance_in_step(self) -> None:
        """The next step takes longer, as on a busy machine."""
        worker = self.core.model_executor.driver_worker.worker
        original = worker.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            worker.execute_model = original
            self.advance()
            return original(*args, **kwargs)

        worker.execute_model = execute_model


def times_of_steps(llm: LLM, between: Callable[[], None]) -> list[float]:
    """The measured steps of two requests; `between` is called after a few steps."""
    recorder, times = drafter_of(llm).recorder, []
    original = recorder.take_report

    def take_report() -> Any:
        report = original()
        times.extend(seconds for _, seconds in report.costs)
        return report

    recorder.take_report = take_report  # type: ignore[method-assign]
    for i in range(2):
        prompt = TokensPrompt(prompt_token_ids=[5 + i, 6, 7, 8] * 8)
        llm.llm_engine.add_request(f"r{i}", prompt, GREEDY)
    steps = 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        steps += 1
        if steps == 8:
            between()
    recorder.take_report = original  # type: ignore[method-assign]
    return times


def test_waiting_for_requests_is_no_step(llama, monkeypatch):
    monkeypatch.setattr(drafter, "STALL_SECONDS", math.inf)
    with engine(llama, {"num_speculative_tokens": 4}, drafts=None) as llm:
        clock = Clock(llm)
        for _ in range(2):
            times = times_of_steps(llm, lambda: None)
            assert len(times) > 3
            assert max(times) < PAUSE / 2
            clock.advance()
        # A step that takes so long in the worker is one.
        assert max(times_of_steps(llm, clock.advance_in_step)) >= PAUSE


def test_a_pause_counts_as_one_slow_step():
    """`pause_generation` keeps requests, and a caller may stop between two steps."""
    cost, work = StepCost(CostCurve([1, 64], [0.01, 0.02])), StepWork(1, 3, 100, 400, 0, waits=True)
    for _ in range(50):
        cost.observe(work, 0.011)
    before = cost.predict(work)
    cost.observe(work, PAUSE)
    assert cost.predict(work) < 1.2 * before
    for _ in range(20):
        cost.observe(work, 0.011)
    assert cost.predict(work) < 1.05 * before


def test_a_stalled_step_is_not_reported_and_a_slow_machine_is():
    """A debugger stops the engine in the middle of a step."""
    stub: Any = SimpleNamespace(
        recorder=StepRecorder(),
        proposer=SimpleNamespace(cost=StepCost(CostCurve([1, 64], [0.01, 0.02]))),
    )
    work = StepWork(1, 3, 100, 400, 0, waits=True)

    def reported(seconds: float) -> int:
        LookaheadDrafter.observe_step(stub, work, seconds)
        return len(stub.recorder.take_report().costs)

    assert reported(0.01) == 1
    assert reported(60.0) == 0
    assert reported(0.1) == 1  # ten times as long is a busy machine
    # A machine that stays slow is learned, and its steps count.
    counted = [reported(2.0) for _ in range(40)]
    assert (counted[0], counted[-1]) == (0, 1)
