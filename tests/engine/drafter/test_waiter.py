"""A worker works, sleeps and then polls until the tokens of a step arrive."""

from types import SimpleNamespace

import pytest

from lookahead_vllm.engine.drafter import waiter
from lookahead_vllm.engine.drafter.waiter import SLEEP_SHARE, Waiter


class Clock:
    """Time passes while the worker works or sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Step:
    """A step of 10 ms."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.launched = clock, clock.now

    @property
    def has_ended(self) -> bool:
        return self._clock.perf_counter() >= self.launched + 0.010


@pytest.mark.parametrize(("work", "slept"), [(0.0, 0.008), (0.005, 0.003), (0.009, 0.0)])
def test_texts_are_inserted_until_shortly_before_the_tokens_come(work, slept, monkeypatch):
    clock, offered = Clock(), list[float]()
    monkeypatch.setattr(
        waiter,
        "time",
        SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep),
    )

    def insert(seconds: float) -> None:
        offered.append(seconds)
        clock.now += work

    called = list[float]()
    waits = Waiter(insert)
    waits.wait(Step(clock))  # type: ignore[arg-type]
    assert not offered and not clock.slept  # nobody knows yet how long a step takes
    step = Step(clock)
    waits.wait(step, lambda: called.append(clock.now - step.launched))  # type: ignore[arg-type]
    assert called == [pytest.approx(max(SLEEP_SHARE * 0.010, work), abs=1e-4)]
    assert offered == [pytest.approx(SLEEP_SHARE * 0.010, abs=1e-4)]
    assert clock.slept == [pytest.approx(slept, abs=1e-4)] * (slept > 0)  # even 0 s take 70 µs
