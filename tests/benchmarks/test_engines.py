"""The benchmark without an engine: its options, its counting and its tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.engines import compare as bench
from benchmarks.engines import fresh_engine
from benchmarks.engines.generate import Generation, Turn, answer
from benchmarks.engines.rows import Outcome, Row, Run, make_row
from benchmarks.tables import turn_table, verdict
from lookahead_vllm.simulation.traces import load_traces
from tests.support.files import jsonl


def generation(tokens: int, steps: int, seconds: float = 0.0, **drafts: int) -> Generation:
    return Generation(list(range(tokens)), steps, seconds=seconds, **drafts)


def turn(*generations: Generation, seconds: float = 10.0, full: float = 0.0) -> Turn:
    return Turn(list(generations), seconds, full, "float32")


def run(*generations: Generation, **more: Any) -> Run:
    return Run([turn(*generations, **more)])


PLAIN = run(generation(11, 10, seconds=6.0), generation(21, 20, seconds=4.0), full=9.0)
DRAFTED = run(
    generation(11, 4, seconds=2.0, drafts=3, draft_tokens=12, accepted=6),
    generation(21, 6, seconds=3.0, drafts=5, draft_tokens=18, accepted=14),
    seconds=5.0,
    full=4.0,
)


def row(method: str = "ngram", run: Run | None = DRAFTED, batch_size: int = 1) -> Row:
    return make_row(method, batch_size, Outcome(run), PLAIN, ["qa", "code"], True)


# Counting.


class ScriptedEngine:
    """A fake: each step emits the scripted number of tokens, by request."""

    def __init__(self, *steps: dict[str, int]) -> None:
        self.steps = list(steps)
        self.lengths: dict[str, int] = {}

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))

    def get_num_unfinished_requests(self) -> int:
        return len(self.lengths)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.lengths[request_id] = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)

    def step(self) -> list[Any]:
        given = self.steps.pop(0)
        return [self.output(request_id, tokens) for request_id, tokens in given.items()]

    def output(self, request_id: str, tokens: int) -> Any:
        self.lengths[request_id] += tokens
        ids = list(range(self.lengths[request_id]))
        metrics = SimpleNamespace(histogram=[1, 0, 2], num_draft_tokens=9)
        completion = SimpleNamespace(token_ids=ids, spec_decode_metrics=metrics)
        finished = all(request_id not in step for step in self.steps)
        return SimpleNamespace(request_id=request_id, outputs=[completion], finished=finished)


def test_a_request_s_steps_are_those_that_emitted_its_tokens_without_its_prefill():
    engine = ScriptedEngine({"0": 1}, {"0": 3, "1": 1}, {}, {"0": 0, "1": 2}, {"0": 2})
    (first, second), seconds, full = answer(engine, [[1], [2]], [None, None], 2)
    assert (first.steps, len(first.token_ids)) == (2, 6)
    assert (second.steps, len(second.token_ids)) == (1, 3)
    assert (first.drafts, first.accepted, first.draft_tokens) == (3, 4, 9)
    assert first.seconds + second.seconds <= seconds and 0 < full < seconds


# Figures.


def test_the_figures_of_a_row_are_those_of_their_definitions():
    figures = row()
    assert figures["tokens"] == 32 and figures["steps"] == 10
    assert figures["tokens_per_s"] == pytest.approx(32 / 5)
    assert figures["ratio"] == pytest.approx(2.0)
    assert figures["tokens_per_step"] == pytest.approx((32 - 2) / 10)
    assert figures["acceptance_length"] == pytest.approx(1 + 20 / 8)
    assert figures["draft_tokens_per_step"] == pytest.approx(30 / 10)
    assert figures["mismatches"] == 0


def test_a_category_has_a_speed_only_where_requests_ran_alone():
    alone, together = row(batch_size=1)["by_category"], row(batch_size=8)["by_category"]
    assert alone["code"]["tokens_per_s"] == pytest.approx(21 / 3)
    assert alone["code"]["ratio"] == pytest.approx(4 / 3)
    assert together["code"]["tokens_per_s"] is None and together["code"]["ratio"] is None
    assert alone["code"]["tokens_per_step"] == together["code"]["tokens_per_step"] == 20 / 6


def test_an_answer_that_differs_from_plain_vllms_is_a_mismatch():
    wrong = Generation([9] * 11, 4, seconds=2.0)
    figures = row(run=run(wrong, DRAFTED.generations[1], seconds=8.0))
    assert figures["tokens_per_s"] == 4 and figures["tokens_per_s_runs"] == [4]
    assert figures["ratio"] == 1.25 and figures["mismatches"] == 1
    assert figures["by_category"]["qa"]["mismatches"] == 1
    assert figures["by_category"]["code"]["mismatches"] == 0


def test_turns_have_a_mean_and_its_standard_error():
    turns = [turn(generation(21, steps), seconds=2.0) for steps in (10, 5)]
    plain = Run([turn(generation(21, 20), seconds=s) for s in (4.0, 2.0)])
    figures = make_row("ngram", 1, Outcome(Run(turns)), plain, ["qa"] * 2, False)
    assert figures["tokens_per_step_runs"] == [2, 4]
    line = turn_table([figures]).splitlines()[-1]
    assert line == "| ngram, batch 1    | 1.50 ± 0.50 | 3.00 ± 1.00 |"


def test_the_answers_of_the_first_run_are_recorded(tmp_path):
    """In the order of its turns, as `lookahead-vllm simulate` reads them."""
    answers = [generation(tokens, 1) for tokens in (2, 3, 4)]
    whole = Run([turn(answers[0], answers[2]), turn(answers[1])])
    prompts = [SimpleNamespace(token_ids=[i], category="abc"[i]) for i in range(3)]
    benchmark: Any = object.__new__(bench.Benchmark)
    benchmark.prompts = {8: prompts}
    benchmark.outcomes = {("none", 8): Outcome(error="it broke"), ("x", 8): Outcome(whole)}
    lines = benchmark.traces()
    traces = load_traces(jsonl(tmp_path / "t.jsonl", *lines)).traces
    found = [(t.prompt.tolist(), len(t.output), t.category) for t in traces]
    assert found == [([0], 2, "a"), ([2], 4, "c"), ([1], 3, "b")]
    benchmark.outcomes = {}
    assert benchmark.traces() == []


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.05, 1.06, 1.07, 1.06], "ahead"),
        ([0.95, 0.94, 0.93, 0.94], "behind"),
        ([1.2, 0.9, 1.1, 1.0], "level"),
        ([1.01, 1.03], "level"),  # two turns say little
        ([1.01, 1.008], "level"),
        ([1.02, 1.03, 1.01], "level"),
        ([1.02, 1.12] * 3 + [0.999] * 9, "ahead"),  # 2.18 standard errors, of 15 turns
    ],
)
def test_a_verdict_is_as_certain_as_the_turns_allow(ratios, expected):
    assert verdict(ratios) == expected


# Runs.


class FakeEngine:
    """A fake of the process with an engine: it answers at a fixed speed, or fails."""

    alive: ClassVar[list[str]] = []
    log: ClassVar[list[str]] = []
    asked: ClassVar[list[int]] = []
    started: ClassVar[list[str]] = []

    def __init__(self, module: str, job: Any, environment: Any, log: Path, on_event: Any) -> None:
        assert module == "benchmarks.engines.generate"
        args = job["engine_args"]
        config = args.get("speculative_config") or {"method": "none"}
        self.name = f"{config['method']} {args['max_num_seqs']}"
        self.started.append(self.name)
        self.prompts = job["prompts"]
        log.write_text("output\n")

    def __enter__(self) -> FakeEngine:
        self.alive.append(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.alive.remove(self.name)

    def wait_until_ready(self) -> None:
        if self.name.startswith("suffix"):
            raise fresh_engine.RunFailed("it broke")

    def ask(self, question: dict[str, Any]) -> Any:
        chosen = question["prompts"]
        self.asked.append(question["batch_size"])
        self.log.append(f"{self.name}: {[self.prompts[i][0] for i in chosen]} of {len(self.alive)}")
        answers = [generation(11, 10, seconds=1.0) for _ in chosen]
        return asdict(turn(*answers, seconds=10.0, full=1.0))

    def bound_cores(self) -> list[int]:
        return [0]


RunBenchmark = Callable[..., tuple[list[str], Any]]


@pytest.fixture
def run_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunBenchmark:
    """Runs it with these options; returns what the engines were asked, and the JSON."""
    monkeypatch.setattr(bench, "FreshEngine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "log", [])
    monkeypatch.setattr(FakeEngine, "started", [])
    monkeypatch.setattr(FakeEngine, "asked", [])
    prompts = jsonl(tmp_path / "p.jsonl", *({"prompt_token_ids": [i]} for i in range(4)))
    out = tmp_path / "out.json"

    def run(*arguments: str) -> tuple[list[str], Any]:
        options = ["--model", "m", "--prompts", str(prompts), "--json", str(out), *arguments]
        assert bench.main(options) == 0
        assert not FakeEngine.alive
        return FakeEngine.log, json.loads(out.read_text())

    return run


def test_one_engine_answers_all_batch_sizes(run_benchmark):
    log, written = run_benchmark(
        "--methods", "none,suffix,ngram", "--batch-sizes", "1,2",
        "--limit", "1,3", "--turns", "1,3", "--one-engine",
    )  # fmt: skip
    assert FakeEngine.asked == [1, 1, *6 * [2]] and len(FakeEngine.started) == 3
    # An engine gets no prompt twice, and all get the same ones.
    asked = [(line.split()[0], int(re.findall(r"\[(\d)\]", line)[0])) for line in log]
    for method in ("none", "ngram"):
        assert sorted(prompt for name, prompt in asked if name == method) == [0, 1, 2, 3]
    assert [row["error"] for row in written["rows"] if row["method"] == "suffix"] == 2 * [
        "it broke"
    ]
    assert [row["prompts"] for row in written["rows"] if row["method"] == "none"] == [1, 3]


def test_engines_that_take_turns_live_together_and_a_failing_one_is_left_out(run_benchmark):
    log, written = run_benchmark(
        "--methods", "none,suffix,ngram", "--batch-sizes", "1,2",
        "--turns", "2,1"
    )  # fmt: skip
    assert log == [
        "none 1: [0, 2] of 3", "ngram 1: [0, 2] of 3",
        "ngram 1: [1, 3] of 3", "none 1: [1, 3] of 3",
        "none 2: [0, 1, 2, 3] of 1", "ngram 2: [0, 1, 2, 3] of 1",
    ]  # fmt: skip
    rows = {row["method"]: row for row in written["rows"] if row["batch_size"] == 1}
    assert rows["suffix"]["error"] == "it broke" and rows["suffix"]["ratio"] is None
    assert rows["ngram"]["ratio_runs"] == [1, 1] and rows["ngram"]["prompts"] == 4
