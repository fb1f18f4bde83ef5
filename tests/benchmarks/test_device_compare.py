"""The simulated device's command line: the options, the runs, the rows and the tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device import compare, options
from benchmarks.device.engine import Job, Measurement
from benchmarks.device.pieces import PIECES, WAIT
from benchmarks.device.rows import METHODS, difference_table, make_row, piece_table, wait_table
from benchmarks.engines.fresh_engine import RunFailed


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
                3.25,
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
    assert difference_table(rows(("plain_v1", 1, 0, 20.0), ("lookahead_v2", 1, 4, 9.0))) == ""
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
        ("--json .", ". is a folder; write the name of a file in it"),
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


def test_a_plain_engine_on_a_cpu_starts_without_numba() -> None:
    code = "import sys; import benchmarks.device.compare; print('numba' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


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
                host_ms=2.0,
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
