"""The simulated device: its order and its times, its texts, and what is recorded of a run."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.device.device import (
    Event,
    SimulatedDevice,
    Stream,
    ThreadClock,
    WallClock,
    unwritten,
)
from benchmarks.device.engine import Job, Measurement, Steps, delayed, summary
from benchmarks.device.pieces import OTHER, PIECES, WAIT, Change, HostPieces, cut, seconds_by_piece
from benchmarks.device.text import VOCABULARY, Text, TextOnDevice


class FakeClock:
    """A clock that stands still unless the host works or waits."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, instant: float) -> None:
        assert instant > self.time
        self.time = instant

    def install(self) -> None:
        raise AssertionError("this process has a clock")

    def work(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def device(clock: FakeClock) -> SimulatedDevice:
    return SimulatedDevice(clock)


MS = 1e-3


def test_work_runs_in_order_and_the_host_goes_on(device: SimulatedDevice, clock: FakeClock) -> None:
    device.launch(6 * MS, tokens=3)
    clock.work(1 * MS)
    device.launch(2 * MS)
    assert clock.now() == pytest.approx(100.001)
    first, second = device.launches
    assert (first.start, first.end, first.tokens) == pytest.approx((100, 100.006, 3))
    assert (second.start, second.end) == pytest.approx((100.006, 100.008))
    clock.work(10 * MS)
    device.launch(1 * MS)
    assert device.launches[-1].start == pytest.approx(100.011)


def test_waits_are_the_idle_times_of_the_device(device: SimulatedDevice, clock: FakeClock) -> None:
    clock.work(5 * MS)  # before the first launch nothing waits
    device.launch(6 * MS)
    device.launch(6 * MS)
    clock.work(13 * MS)
    device.launch(6 * MS)
    assert [launch.wait for launch in device.launches] == pytest.approx([0, 0, 1 * MS])


def test_an_event_is_reached_when_the_work_before_it_ends(
    device: SimulatedDevice, clock: FakeClock
) -> None:
    event = Event(device)
    assert event.query()  # never recorded
    device.launch(6 * MS)
    event.record()
    device.launch(6 * MS)
    clock.work(5.9 * MS)
    assert not event.query()
    event.synchronize()
    assert clock.now() == pytest.approx(100.006)
    assert event.query()
    event.synchronize()  # no second wait
    assert clock.now() == pytest.approx(100.006)
    device.synchronize()
    assert clock.now() == pytest.approx(100.012)


def test_an_event_of_an_idle_stream_is_reached_at_once(
    device: SimulatedDevice, clock: FakeClock
) -> None:
    before, after = Event(device), Event(device)
    before.record()
    device.launch(6 * MS)
    after.record()
    assert before.query()
    assert before.elapsed_time(after) == pytest.approx(6.0)


def test_streams_wait_for_each_other(device: SimulatedDevice, clock: FakeClock) -> None:
    copies = Stream(device)
    device.launch(6 * MS)
    assert copies.query()
    copies.wait_stream(device.main)
    event = copies.record_event()
    device.launch(6 * MS)  # not waited for: it came later
    event.synchronize()
    assert clock.now() == pytest.approx(100.006)
    other = Stream(device)
    other.wait_event(device.main.record_event())
    with other:
        assert device.current is other
        device.launch(1 * MS)
    assert device.current is device.main
    assert device.launches[-1].start == pytest.approx(100.012)
    other.synchronize()
    assert clock.now() == pytest.approx(100.013)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
def test_copies_arrive_when_the_device_has_reached_them(
    device: SimulatedDevice, clock: FakeClock, dtype: Any
) -> None:
    buffer = np.array([[1, 2]], dtype)
    device.launch(6 * MS)
    first = device.copy_to_host(buffer)
    event = device.main.record_event()
    buffer[:] = 7  # the next step's kernels overwrite it
    device.launch(6 * MS)
    second = device.copy_to_host(buffer)
    clock.work(5 * MS)
    assert not event.query()
    nonsense = np.full((1, 2), unwritten(np.dtype(dtype)), dtype)
    np.testing.assert_array_equal(first, nonsense)
    event.synchronize()
    np.testing.assert_array_equal(first, [[1, 2]])
    np.testing.assert_array_equal(second, nonsense)
    device.synchronize()
    np.testing.assert_array_equal(second, [[7, 7]])


@pytest.mark.parametrize("clock_type", [WallClock, ThreadClock])
def test_a_clock_never_ends_a_wait_early(clock_type: Any) -> None:
    clock = clock_type()
    for seconds in (-1.0, 0.0, 1e-4, 2e-3):
        instant, start = clock.now() + seconds, time.perf_counter()
        clock.sleep_until(instant)
        assert clock.now() >= instant
        assert time.perf_counter() - start >= seconds - 1e-4


def test_only_work_and_waits_count_on_the_cpu_clock() -> None:
    clock = ThreadClock()
    start = clock.now()
    time.sleep(0.02)  # as if another program ran
    assert clock.now() - start < 0.01
    while clock.now() - start < 0.01:
        pass
    clock.sleep_until(start + 0.02)
    assert 0.02 <= clock.now() - start < 0.03


def test_going_to_sleep_takes_no_time_on_the_cpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(seconds: float) -> None:
        end = time.thread_time() + seconds / 2
        while time.thread_time() < end:
            pass

    monkeypatch.setattr(time, "sleep", busy)
    clock = ThreadClock()
    instant = clock.now() + 0.02
    clock.sleep_until(instant)
    assert instant <= clock.now() < instant + 0.005


def test_an_engine_measures_by_the_cpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", machine)
    monkeypatch.setattr(time, "sleep", time.sleep)
    clock = ThreadClock()
    clock.install()
    before = clock.now()
    time.sleep(0.02)  # of the engine: on a real device, time goes on
    assert 0.02 <= clock.now() - before < 0.03
    assert abs(time.perf_counter() - clock.now()) < 0.01
    assert abs(machine() - clock.now()) > 0.01
    with ThreadPoolExecutor(1) as other:
        assert abs(other.submit(lambda: time.perf_counter()).result() - machine()) < 1.0


def test_the_cpu_clock_is_of_one_thread() -> None:
    clock = ThreadClock()
    with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="one thread"):
        other.submit(clock.now).result()


def steps(
    device: SimulatedDevice, clock: FakeClock, delay: float, overlap: bool, number: int = 5
) -> list[float]:
    """The waits of a host that works for `delay` in each step, with or without asynchronous
    scheduling."""
    running: list[Event] = []
    for _ in range(number):
        clock.work(delay)
        device.launch(6 * MS)
        running.append(device.main.record_event())
        if not overlap:
            running.pop().synchronize()
        elif len(running) == 2:
            running.pop(0).synchronize()
    return [launch.wait for launch in device.launches[1:]]


def test_a_delay_of_the_host_is_waited_for_in_synchronous_steps(
    device: SimulatedDevice, clock: FakeClock
) -> None:
    assert steps(device, clock, 2 * MS, overlap=False) == pytest.approx([2 * MS] * 4)


def test_a_delay_of_the_host_is_hidden_in_asynchronous_steps(
    device: SimulatedDevice, clock: FakeClock
) -> None:
    assert steps(device, clock, 2 * MS, overlap=True) == pytest.approx([0.0] * 4)
    longer = SimulatedDevice(clock)
    # More host work than the device has: the rest is waited for.
    assert steps(longer, clock, 8 * MS, overlap=True)[1:] == pytest.approx([2 * MS] * 3)


class Host:
    """Something with methods to watch."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def outer(self) -> str:
        self._clock.work(1.0)
        self.inner()
        self._clock.work(2.0)
        return "result"

    def inner(self) -> None:
        self._clock.work(4.0)

    def fail(self) -> None:
        self._clock.work(1.0)
        raise OSError


def test_the_innermost_piece_counts(clock: FakeClock) -> None:
    pieces, host = HostPieces(clock.now), Host(clock)
    pieces.watch(host, "outer", "prepare")
    pieces.watch(host, "inner", "draft")
    pieces.watch(host, "fail", "update")
    pieces.watch(host, "not there", "sample")
    pieces.watch(None, "inner", "sample")
    clock.work(0.5)
    assert host.outer() == "result"
    clock.work(0.25)
    with pytest.raises(OSError):
        host.fail()
    pieces.watch_wait(True)
    clock.work(8.0)
    pieces.watch_wait(False)
    names = [change.piece for change in pieces.changes]
    assert names == [OTHER, "prepare", "draft", "prepare", OTHER, "update", OTHER, WAIT, OTHER]
    spent = seconds_by_piece(pieces.changes, clock.now())
    assert list(spent) == list(PIECES)
    wanted = {"prepare": 3.0, "draft": 4.0, OTHER: 0.75, "update": 1.0, WAIT: 8.0}
    assert {piece: t for piece, t in spent.items() if t} == pytest.approx(wanted)


def test_a_part_of_the_pieces_begins_in_the_middle_of_one() -> None:
    changes = [Change(0.0, OTHER), Change(1.0, "draft"), Change(3.0, "prepare"), Change(9.0, WAIT)]
    part = cut(changes, 2.0, 5.0)
    assert part == [Change(2.0, "draft"), Change(3.0, "prepare")]
    spent = seconds_by_piece(part, 5.0)
    assert (spent["draft"], spent["prepare"], sum(spent.values())) == (1.0, 2.0, 3.0)
    assert cut(changes, 1.0, 3.0) == [Change(1.0, "draft")]


JOB = Job(
    second_runner=False,
    lookahead=True,
    proposer=None,
    batch_size=2,
    nodes=4,
    device_ms=6.0,
    token_us=0.0,
    steps=20,
    host_delay_ms=0.0,
    waits=False,
    clock="cpu",
)


def measured(device: SimulatedDevice, clock: FakeClock, number: int = 20) -> Measurement:
    """Steps whose host drafts for 1 ms and schedules for 2 ms; every tenth one for 9 ms."""
    pieces = HostPieces(clock.now)
    device.on_wait = pieces.watch_wait
    for step in range(number + 1):
        pieces.begin("draft")
        clock.work(1 * MS)
        pieces.end()
        pieces.begin("schedule")
        clock.work((9 if step % 10 == 9 else 2) * MS)
        pieces.end()
        device.launch(6 * MS, tokens=10)
        clock.work(1 * MS)  # hidden behind the forward pass
        device.synchronize()
    return summary(JOB, device.launches, pieces, num_tokens=80, host_ms=2.5)


def test_the_summary_of_a_run(device: SimulatedDevice, clock: FakeClock) -> None:
    result = measured(device, clock)
    assert len(result.waits) == 20
    assert sorted(result.waits)[:18] == pytest.approx([3000.0] * 18)
    by_piece = {piece: time for piece, time in result.waits_by_piece.items() if time > 1e-6}
    assert by_piece == pytest.approx({"draft": 1000.0, "schedule": 2700.0})
    assert result.step_ms == pytest.approx(9.0)
    assert result.nodes_sent == pytest.approx(4.0)
    assert result.tokens_per_step == pytest.approx(2.0)
    assert np.ravel(result.launches) == pytest.approx([0, 6, 9, 15, 18, 24])
    assert result.changes[0][0] == 0.0
    assert [piece for _, piece in result.changes][1:5] == [WAIT, OTHER, "draft", OTHER]


class FakeCore:
    """An engine core whose first step is queued and returns nothing."""

    def __init__(self, reasons: list[str | None]) -> None:
        self.reasons = iter(reasons)
        self.after: list[bool] = []

    def step_fn(self) -> tuple[Any, bool]:
        reason = next(self.reasons)
        if reason == "queued":
            return None, True

        class Output:
            request_id = "a"
            new_token_ids = (1, 2, 3)
            finish_reason = reason

        class Outputs:
            outputs = (Output,)

        return {0: Outputs}, True

    def post_step(self, executed: bool) -> None:
        self.after.append(executed)


def test_emitted_tokens_are_counted() -> None:
    core = FakeCore(["queued", None, None, "length"])
    counted = Steps(core)
    for _ in range(3):
        counted.run()
    assert (counted.num_tokens, counted.started, core.after) == (6, {"a"}, [True] * 3)
    with pytest.raises(RuntimeError, match="fewer --steps"):
        counted.run()


def test_a_planted_delay_comes_before_the_call() -> None:
    start = time.thread_time()
    assert delayed(lambda value: value + 1, 2e-3)(1) == 2
    assert time.thread_time() - start >= 2e-3


@pytest.mark.parametrize("patterned", [False, True])
def test_texts_are_the_same_on_the_device(patterned: bool) -> None:
    text = Text(patterned)
    rule = TextOnDevice(text)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 128, 300).astype(np.int32)
    positions = rng.integers(0, 10_000, 300)
    got = rule.next_tokens(torch.from_numpy(tokens), torch.from_numpy(positions)).tolist()
    pairs = zip(tokens.tolist(), positions.tolist(), strict=True)
    assert got == [text.next_token(token, position) for token, position in pairs]
    assert all(0 <= token < VOCABULARY for token in got)


def share_of_hits(prompt: list[int]) -> float:
    """How often the token that followed a token most often follows it again."""
    followers: dict[int, Counter[int]] = defaultdict(Counter)
    hits = 0
    for token, follower in pairwise(prompt):
        hits += [follower] == [best for best, _ in followers[token].most_common(1)]
        followers[token][follower] += 1
    return hits / len(prompt)


def test_texts_with_patterns_can_be_predicted_and_others_not() -> None:
    [patterned] = Text(patterned=True).prompts(1, 2000)
    [random] = Text(patterned=False).prompts(1, 2000)
    assert 0.5 < share_of_hits(patterned) < 0.8
    assert share_of_hits(random) < 0.01


def test_texts_without_patterns_never_become_the_same() -> None:
    prompts = Text(patterned=False).prompts(64, 300)
    assert all(len(set(tokens)) == 64 for tokens in zip(*prompts, strict=True))
