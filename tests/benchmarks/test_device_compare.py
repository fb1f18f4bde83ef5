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

from benchmarks.device import compare
from benchmarks.device.engine import Job, Measurement
from benchmarks.device.pieces import PIECES, WAIT
from benchmarks.device.rows import METHODS, make_row
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
