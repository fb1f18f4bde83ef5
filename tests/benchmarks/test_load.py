"""A changing load: the requests that are sent, the steps that are recorded, and the tables."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engines.fresh_engine import RunFailed
from benchmarks.load import compare as script
from benchmarks.load.report import Phase, by_phase, figures
from benchmarks.load.steps import BusyCore, Step, StepLog, play


class FakeEngine:
    """A fake: a step takes one second, and a request `length` steps of two tokens."""

    def __init__(self, length: int = 3, report: bool = True) -> None:
        self.engine_core = self
        self.now = 100.0
        self.length, self.report = length, report
        self.left: dict[str, int] = {}
        self.aborted: list[str] = []

    def clock(self) -> float:
        return self.now

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.left[name] = self.length

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def get_output(self) -> Any:
        self.now += 1
        outputs = []
        for name in list(self.left):
            first = self.left[name] == self.length
            self.left[name] -= 1
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    new_token_ids=[5, 6],
                    finish_reason=None if self.left[name] else "stop",
                    prefill_stats="read" if first else None,
                )
            )
        self.left = {name: left for name, left in self.left.items() if left}
        stats = SimpleNamespace(num_running_reqs=len(self.left))
        if self.report:
            stats.lookahead = SimpleNamespace(verified=[3, 1, 0, 0], costs=[(0.9, 1.0)])
        return SimpleNamespace(outputs=outputs, scheduler_stats=stats, timestamp=self.now)

    def step(self) -> list[Any]:
        outputs = self.engine_core.get_output().outputs
        return [
            SimpleNamespace(request_id=o.request_id, finished=o.finish_reason is not None)
            for o in outputs
        ]


def requests() -> Iterator[tuple[str, Any, Any]]:
    return ((str(number), None, None) for number in count())


def step(**changes: Any) -> Step:
    given = dict(
        time=0.5, phase=0, running=2, tokens=4, seconds=0.1, nodes=4, predicted=0.08
    )  # fmt: skip
    return Step(**{**given, **changes})  # type: ignore[arg-type]


# Playing.


def test_a_batch_keeps_its_size_and_the_requests_of_a_larger_one_finish() -> None:
    engine = FakeEngine()
    begun: list[tuple[int, int | None]] = []
    phases = [(1, 4.0, None), (3, 4.0, 5), (1, 4.0, None)]

    def begin(phase: int, core: int | None) -> None:
        begun.append((phase, core))

    steps = play(engine, StepLog(engine), phases, requests(), begin, engine.clock)
    assert begun == [(0, None), (1, 5), (2, None)]
    assert [step.running for step in steps] == [1, 1, 1, 1, 3, 3, 3, 3, 3, 2, 1, 1]
    assert [step.phase for step in steps] == [0] * 4 + [1] * 4 + [2] * 4
    assert [step.time for step in steps] == list(range(1, 13))
    assert engine.aborted == list(engine.left)


def test_a_step_that_reads_a_prompt_is_not_timed() -> None:
    engine = FakeEngine()
    steps = play(
        engine, StepLog(engine), [(1, 4.0, None)], requests(), lambda *_: None, engine.clock
    )
    assert [step.seconds for step in steps] == [None, 1, 1, None]
    assert {(step.tokens, step.nodes, step.predicted) for step in steps} == {(2, 4, 0.9)}


def test_a_step_is_not_timed_while_another_request_reads_its_prompt() -> None:
    engine = FakeEngine()
    log = StepLog(engine)
    engine.add_request("0", None, None)
    engine.step()
    get_and_record = engine.engine_core.get_output
    assert engine.step() and log.steps[-1].seconds == 1
    engine.left["reading"] = 9
    original = FakeEngine.get_output

    def half(self: FakeEngine) -> Any:
        outputs = original(self)
        outputs.outputs = [o for o in outputs.outputs if o.request_id == "0"]
        return outputs

    log._get_output = lambda: half(engine)
    get_and_record()
    assert log.steps[-1].running == 1 and log.steps[-1].seconds is None


def test_plain_vllm_has_no_nodes() -> None:
    engine = FakeEngine(report=False)
    steps = play(
        engine, StepLog(engine), [(1, 1.0, None)], requests(), lambda *_: None, engine.clock
    )
    assert steps[0].nodes is None and steps[0].predicted is None


# Tables.


def test_the_figures_of_a_phase() -> None:
    steps = [step(), step(seconds=None, nodes=0, predicted=None), step(seconds=0.2, nodes=8)]
    assert figures(steps, 2.0) == {
        "tokens_per_s": 6,
        "requests": 2,
        "step_ms": pytest.approx(150),
        "nodes": 4,
        "predicted_ms": 80,
        "error": pytest.approx((0.2 + 0.6) / 2),
    }
    nothing = figures([], 2.0)
    assert nothing["tokens_per_s"] == 0 and nothing["step_ms"] is None


PHASES = [Phase(1, 1.0), Phase(8, 2.0, busy=True)]
RUNS = {
    "none": [step(nodes=None, predicted=None), step(phase=1, nodes=None, predicted=None)],
    "lookahead": [step(tokens=6)],
}


# The command line.


def test_a_busy_core_has_a_process_that_computes() -> None:
    busy = BusyCore()
    busy.set(None)
    busy.set(min(os.sched_getaffinity(0)))
    process = busy._process
    assert process is not None
    deadline = time.monotonic() + 120
    while Path(f"/proc/{process.pid}/stat").read_text().split()[13] == "0":  # CPU time
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    busy.set(None)
    assert process.poll() is not None


# Whole runs.


def test_methods_play_the_same_phases_and_a_failing_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fresh:
        def __init__(self, module: str, job: Any, environment: Any, log: Path, show: Any) -> None:
            assert module == "benchmarks.load.steps"
            assert job["engine_args"]["max_num_seqs"] == 8 and len(job["prompts"]) == 3
            self.config, self.show = job["engine_args"].get("speculative_config"), show

        def __enter__(self) -> Fresh:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait_until_ready(self) -> None:
            if self.config == {"method": "ngram"}:
                raise RunFailed("it broke")
            self.show({"event": "warm-up"})

        def bound_cores(self) -> list[int]:
            return [0]

        def ask(self, phases: Any) -> Any:
            assert phases == [(1, 1.0, None), (8, 2.0, 0)]
            for number in range(2):
                self.show({"event": "phase", "phase": number})
            return [asdict(one) for one in RUNS["lookahead" if self.config else "none"]]

    monkeypatch.setattr(script, "FreshEngine", Fresh)
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [i]}) for i in range(3)))
    arguments = ["--model", "m", "--prompts", str(prompts), "--json", str(out)]
    arguments += ["--phases", "1:1,8:2:busy"]
    assert script.main(arguments) == 0
    written = json.loads(out.read_text())
    assert written["steps"]["lookahead"] == [asdict(RUNS["lookahead"][0])]
    assert written["by_phase"] == by_phase(RUNS, PHASES)
    assert "2: batch 8, 2 s, busy core" in capsys.readouterr().out

    assert script.main([*arguments, "--config", 'other={"method": "ngram"}']) == 1
    assert "other failed: it broke" in capsys.readouterr().err
    assert json.loads(out.read_text())["failed"] == {"other": "it broke"}
