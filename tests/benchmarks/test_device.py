"""The simulated device: its order, its times, and an engine on it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.device import compare
from benchmarks.device.device import Event, HostClock, SimulatedDevice, Stream, unwritten


class FakeClock(HostClock):
    """A clock that stands still unless the host works or waits."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, instant: float) -> None:
        assert instant > self.time
        self.time = instant

    def work(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def device(clock: FakeClock) -> SimulatedDevice:
    return SimulatedDevice(clock)


MS = 1e-3


def test_waits_are_the_idle_times_of_the_device(device: SimulatedDevice, clock: FakeClock) -> None:
    clock.work(5 * MS)  # before the first launch nothing waits
    device.launch(6 * MS, tokens=3)
    clock.work(1 * MS)
    device.launch(6 * MS)
    clock.work(13 * MS)
    device.launch(6 * MS)
    assert [launch.wait for launch in device.launches] == pytest.approx([0, 0, 2 * MS])
    starts = [launch.start for launch in device.launches]
    assert starts == pytest.approx([100.005, 100.011, 100.019])


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
    event.synchronize()  # no second wait
    assert event.query() and clock.now() == pytest.approx(100.006)
    device.synchronize()
    assert clock.now() == pytest.approx(100.012)


def test_streams_wait_for_each_other(device: SimulatedDevice, clock: FakeClock) -> None:
    copies, other = Stream(device), Stream(device)
    device.launch(6 * MS)
    assert copies.query()
    copies.wait_stream(device.main)
    event = copies.record_event()
    device.launch(6 * MS)  # not waited for: it came later
    event.synchronize()
    assert clock.now() == pytest.approx(100.006)
    other.wait_event(device.main.record_event())
    with other:
        device.launch(1 * MS)
    assert device.current is device.main
    assert device.launches[-1].start == pytest.approx(100.012)
    other.synchronize()
    assert clock.now() == pytest.approx(100.013)


def test_copies_arrive_when_the_device_has_reached_them(device: SimulatedDevice) -> None:
    buffer = np.array([[1, 2]])
    device.launch(6 * MS)
    first = device.copy_to_host(buffer)
    event = device.main.record_event()
    buffer[:] = 7  # the next step's kernels overwrite it
    device.launch(6 * MS)
    second = device.copy_to_host(buffer)
    nonsense = np.full_like(buffer, unwritten(buffer.dtype))
    np.testing.assert_array_equal(first, nonsense)
    event.synchronize()
    np.testing.assert_array_equal(first, [[1, 2]])
    np.testing.assert_array_equal(second, nonsense)
    device.synchronize()
    np.testing.assert_array_equal(second, [[7, 7]])


def test_only_work_and_waits_count_on_the_clock() -> None:
    clock = HostClock()
    start = clock.now()
    time.sleep(0.02)  # as if another program ran
    assert clock.now() - start < 0.01
    while clock.now() - start < 0.01:
        pass
    clock.sleep_until(start + 0.02)
    assert 0.02 <= clock.now() - start < 0.03


def test_an_engine_measures_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", machine)
    monkeypatch.setattr(time, "sleep", time.sleep)
    clock = HostClock()
    clock.install()
    before = clock.now()
    time.sleep(0.02)  # of the engine: on a real device, time goes on
    assert 0.02 <= clock.now() - before < 0.03
    assert abs(time.perf_counter() - clock.now()) < 0.01 < abs(machine() - clock.now())


@pytest.mark.slow
def test_asynchronous_steps_hide_the_host_and_drafts_are_accepted(tmp_path: Path) -> None:
    """The host takes 5 ms more in each step, the device 20 ms."""
    path = tmp_path / "rows.json"
    argv = ["--device-ms", "20", "--host-delay-ms", "5", "--methods", "lookahead", "--steps"]
    argv += ["10", "--batch-sizes", "2", "--nodes", "4", "--json", str(path)]
    assert compare.main(argv) == 0
    [row] = json.loads(path.read_text())
    assert row["device_wait_us"] < 5e3 and row["host_ms"] >= 5
    assert row["step_ms"] >= 20
    assert 3 < row["nodes_sent"] <= 4 and 1.5 < row["tokens_per_step"] < 4
