"""The simulated device: its order and its times, what is recorded, the options and the tables."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.device import compare, options
from benchmarks.device.device import (
    Event,
    Launch,
    SimulatedDevice,
    Stream,
    ThreadClock,
    WallClock,
    unwritten,
)
from benchmarks.device.engine import Job, Measurement, Steps, delayed, summary, typical
from benchmarks.device.pieces import OTHER, PIECES, WAIT, Change, HostPieces, cut, seconds_by_piece
from benchmarks.device.rows import METHODS, difference_table, make_row, piece_table, wait_table
from benchmarks.device.text import VOCABULARY, Text, TextOnDevice
from benchmarks.engines.fresh_engine import RunFailed


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

    clock = ThreadClock()
    monkeypatch.setattr(time, "sleep", busy)
    instant = clock.now() + 0.02
    clock.sleep_until(instant)
    assert instant <= clock.now() < instant + 0.005


def test_an_engine_measures_by_the_cpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", machine)
    clock = ThreadClock()
    clock.install()
    assert 0 <= time.perf_counter() - clock.now() < 0.01
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
    batch_size=2,
    nodes=4,
    device_ms=6.0,
    token_us=0.0,
    steps=20,
    host_delay_ms=0.0,
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
    return summary(JOB, device.launches, pieces, num_tokens=80)


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


def test_the_picture_shows_typical_steps() -> None:
    waits = [0.0, 5.0, 5.0, 1.0, 1.0, 1.0, 5.0, 0.0, 0.5]
    launches = [Launch(i, i + 1, wait, 1) for i, wait in enumerate(waits)]
    assert [launch.wait for launch in typical(launches)][1:] == [1.0, 1.0]


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


def rows(*kinds: tuple[str, int, int, float]) -> list[Any]:
    """Rows of a method, a batch size, nodes, and one wait in all steps."""
    nothing = dict.fromkeys(PIECES, 0.0)
    return [
        make_row(
            method,
            size,
            nodes,
            Measurement(
                [wait] * 9 + [wait + 100],
                {**nothing, "draft": wait + 10},
                6.5,
                float(nodes),
                1.5,
                [],
                [],
            ),
        )
        for method, size, nodes, wait in kinds
    ]


def test_a_row_has_what_the_json_promises() -> None:
    [row] = rows(("lookahead_v2", 8, 4, 300.0))
    written = json.loads(json.dumps(row.to_dict()))
    assert {key: written[key] for key in ("method", "batch_size", "nodes", "device_wait_us")} == {
        "method": "lookahead_v2",
        "batch_size": 8,
        "nodes": 4,
        "device_wait_us": 300.0,
    }
    assert written["device_wait_p90_us"] == pytest.approx(310.0)
    assert written["device_wait_mean_us"] == pytest.approx(310.0)
    assert written["by_piece_us"]["draft"] == 310.0
    assert (written["steps"], written["step_ms"], written["tokens_per_step"]) == (10, 6.5, 1.5)


def test_the_tables() -> None:
    some = rows(
        ("plain_v1", 1, 0, 700.0),
        ("plain_v2", 1, 0, 0.0),
        ("plain_v2", 8, 0, 5.0),
        ("lookahead_v1", 1, 4, 1500.0),
        ("lookahead_v2", 1, 0, 20.0),
        ("lookahead_v2", 8, 0, 15.0),
        ("lookahead_v2", 8, 16, 500.0),
    )
    waits = wait_table(some).splitlines()
    assert "700 (710, 710)" in waits[2] and waits[2].rstrip(" |").endswith("–")
    assert len(waits) == 2 + 5
    by_name = {line.split("|")[1].strip(): line for line in difference_table(some).splitlines()}
    assert "+800 (+800)" in by_name["lookahead_v1, 4 nodes"]
    assert "+20 (+20)" in by_name["lookahead_v2, 0 nodes"]
    assert "+10 (+10)" in by_name["lookahead_v2, 0 nodes"]
    assert by_name["lookahead_v2, 16 nodes"].count("–") == 1
    assert difference_table(rows(("lookahead_v2", 1, 0, 20.0))) == ""
    assert difference_table(rows(("plain_v2", 1, 0, 20.0))) == ""
    pieces = piece_table(some)
    assert "draft" in pieces and "schedule" not in pieces  # nothing was scheduled


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--device-ms 0", "'0' is not a number from 0.1 to 1000"),
        ("--device-ms nan", "'nan' is not a number from 0.1 to 1000"),
        ("--device-ms six", "'six' is not a number"),
        ("--runner v3", "invalid choice: 'v3'"),
        ("--runner v2 --batch-sizes 0", "'0' is not a number of at least 1"),
        ("--runner v2 --batch-sizes 4096", "--batch-sizes 4096 is too many; write up to 1024"),
        ("--runner v2 --nodes 4,200", "'200' is not a number of nodes from 0 to 128"),
        ("--runner v2 --nodes 4,", "'' is not a number of nodes"),
        ("--runner v2 --methods plain", "there is no method 'plain'; there are plain_v1"),
        ("--runner v1 --device-ms 6 --methods plain_v2", "plain_v2 does not run with --runner v1"),
        ("--runner v2 --clock sun", "invalid choice: 'sun'"),
        ("--clock wall", "--clock is for the simulated device"),
        ("--runner v2 --steps 3", "--steps 3 is too few for a median; write 10 or more"),
        ("--runner v2 --json no/where.json", "there is no folder no to write where.json in"),
        ("--runner v2 --json .", ". is a folder; write the name of a file in it"),
        ("--runner v2 --timeline a.pdf", "--timeline a.pdf: the name must end in .png or .svg"),
        ("--steps 20", "--steps is for the simulated device; add --device-ms 6"),
        ("--runner v1 --methods plain_v1", "--methods is for the simulated device"),
        ("--host-delay-ms 2", "--host-delay-ms is for the simulated device"),
        ("--nodes 0", "--nodes 0 is for the simulated device; add --device-ms 6, or write one"),
        ("--nodes 4,16", "--nodes 4,16 is for the simulated device"),
    ],
)
def test_wrong_options_are_refused(
    given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare.main(given.split())
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


def test_timelines_need_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise options.PackageNotFoundError(name)

    monkeypatch.setattr(options, "version", missing)
    with pytest.raises(SystemExit):
        compare.main(["--runner", "v2", "--timeline", "a.svg"])
    assert "--timeline needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_without_a_device_the_measurement_on_a_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(compare.step_overhead, "main", lambda argv: ran.append(argv) or 0)
    assert compare.main([]) == 0
    sizes = ["--batch-sizes", "1,8", "--nodes", "5", "--json", "a.json"]
    assert compare.main(["--runner", "v1", *sizes]) == 0
    assert compare.main(["--nodes", "16", "--one", "8", "lookahead"]) == 0
    assert ran == [
        [],
        sizes,
        ["--nodes", "16", "--one", "8", "lookahead"],
    ]


FakeProcess = Callable[..., Any]


def fake_engines(fail: Callable[[Job], bool] = lambda job: False) -> tuple[list[Job], FakeProcess]:
    """The jobs that were run, and a stand-in for FreshEngine that waits as long as the nodes."""
    jobs: list[Job] = []

    class Process:
        def __init__(self, job: Job) -> None:
            self.job = job

        def wait_until_ready(self) -> None:
            if fail(self.job):
                raise RunFailed("it broke")

        def ask(self, question: Any) -> Any:
            waits = [100.0 * self.job.nodes] * self.job.steps
            nothing = dict.fromkeys(PIECES, 0.0)
            launches = [(0.0, 6.0), (6.5, 12.5)]
            changes = [(0.0, "prepare"), (1.0, WAIT), (6.0, "schedule")]
            return dict(
                waits=waits,
                waits_by_piece=nothing,
                step_ms=6.0,
                nodes_sent=float(self.job.nodes),
                tokens_per_step=1.0,
                launches=launches,
                changes=changes,
            )

    @contextmanager
    def process(
        module: str, job: dict[str, Any], environment: dict[str, str], log: Path, *_: Any
    ) -> Iterator[Process]:
        jobs.append(Job(**job))
        assert environment["VLLM_USE_V2_MODEL_RUNNER"] == str(int(jobs[-1].second_runner))
        assert environment["VLLM_CACHE_ROOT"].startswith(str(log.parent))
        log.write_text("")
        yield Process(jobs[-1])

    return jobs, process


def test_all_methods_are_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, process = fake_engines()
    monkeypatch.setattr(compare, "FreshEngine", process)
    path = tmp_path / "rows.json"
    argv = ["--runner", "v2", "--device-ms", "6", "--batch-sizes", "1,8", "--json", str(path)]
    assert compare.main(argv) == 0
    written = json.loads(path.read_text())
    got = [(row["batch_size"], row["method"], row["nodes"]) for row in written]
    assert got == [
        (size, method, nodes)
        for size in (1, 8)
        for method in METHODS
        for nodes in ((0, 4, 16) if METHODS[method].lookahead else (0,))
    ]
    assert all(row["device_wait_us"] == 100.0 * row["nodes"] for row in written)
    assert {job.device_ms for job in jobs} == {6.0}
    printed = capsys.readouterr().out
    assert "| lookahead_v2, 16 nodes" in printed and "+1600 (+1600)" in printed


def test_the_first_runner_has_its_methods_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, process = fake_engines()
    monkeypatch.setattr(compare, "FreshEngine", process)
    argv = "--runner v1 --device-ms 3 --nodes 2 --batch-sizes 4 --steps 10 --host-delay-ms 1"
    assert compare.main(argv.split()) == 0
    assert [(job.second_runner, job.lookahead, job.nodes) for job in jobs] == [
        (False, False, 0),
        (False, True, 2),
    ]
    assert (jobs[1].batch_size, jobs[1].steps, jobs[1].host_delay_ms) == (4, 10, 1.0)


def test_a_failure_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, process = fake_engines(fail=lambda job: job.lookahead and job.second_runner)
    monkeypatch.setattr(compare, "FreshEngine", process)
    monkeypatch.setattr(compare.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    path = tmp_path / "rows.json"
    argv = ["--runner", "v2", "--batch-sizes", "1", "--nodes", "4", "--json", str(path)]
    assert compare.main(argv) == 1
    assert [row["method"] for row in json.loads(path.read_text())] == list(METHODS)[:3]
    error = capsys.readouterr().err
    assert "lookahead_v2, 4 nodes, batch 1 failed: it broke" in error
    assert str(tmp_path / "lookahead_v2-1-4.log") in error
    assert tmp_path.is_dir()  # with the log


@pytest.mark.parametrize("name", ["steps.svg", "steps.png"])
def test_the_timeline_is_drawn(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, process = fake_engines()
    monkeypatch.setattr(compare, "FreshEngine", process)
    path = tmp_path / name
    argv = ["--runner", "v2", "--batch-sizes", "1,2", "--nodes", "4", "--timeline", str(path)]
    assert compare.main(argv) == 0
    content = path.read_bytes()
    assert len(content) > 5000
    if name.endswith("svg"):
        assert b"lookahead_v2, 4 nodes" in content or b"<path" in content
