"""The cost of a step is measured once and cached, unless it was disturbed; damaged or foreign files
are not used."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead_vllm.engine.cost import measure as step_cost
from lookahead_vllm.engine.cost import timed_passes
from lookahead_vllm.engine.cost.timed_passes import (
    BATCHES,
    CapturedTokens,
    Measurement,
    PassPlan,
    measure,
)
from lookahead_vllm.engine.runner.forward_passes import RunnerPasses
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    random_prompts,
    record_plain,
    runner_of,
)

AUTO = {"proposer": "ngram_trie"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines keep what they measured."""
    monkeypatch.setattr(step_cost, "envs", SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path)))
    monkeypatch.setattr(timed_passes, "MAX_SECONDS", math.inf)  # all is measured, however slowly
    return tmp_path / "lookahead_step_cost"


@pytest.fixture
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are made, and take 10 ms, 0.1 more for each token, and 1 µs for each token of context
    that a row attends to."""
    last: dict[str, Any] = {}
    original = RunnerPasses._run

    def note(self: RunnerPasses, num_tokens: int, **options: Any) -> None:
        last.update(num_tokens=num_tokens, context_len=options.get("context_len", 0))
        original(self, num_tokens, **options)

    def time_of(prepare: Any) -> float:
        with prepare() as run:
            run()
        return 0.010 + last["num_tokens"] * (1e-4 + 1e-6 * last["context_len"])

    monkeypatch.setattr(RunnerPasses, "_run", note)
    monkeypatch.setattr(timed_passes, "_seconds", time_of)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Every measurement that is made."""
    found: list[Measurement] = []
    original = step_cost.measure

    def measure(plan: PassPlan) -> Measurement:
        found.append(original(plan))
        return found[-1]

    monkeypatch.setattr(step_cost, "measure", measure)
    return found


@pytest.mark.usefixtures("_timed")
def test_an_engine_measures_once(llama, kept, measured):
    prompts = random_prompts(3, 30)
    vanilla = record_plain(llama, prompts)
    for _ in range(2):
        with engine(llama, AUTO, drafts=None) as llm:
            cost = drafter_of(llm).proposer.cost
            assert cost is not None and cost.curve.sizes.tolist() == [2**i for i in range(9)]
            # The dummy runs left nothing behind.
            runner = runner_of(llm)
            assert runner.max_num_reqs == 16 and not runner._dummy_step.forest.num_nodes
            assert generate(llm, prompts) == vanilla
    assert len(measured) == 1
    (file,) = kept.iterdir()
    assert json.loads(file.read_text()) == measured[0].times
    assert cost.curve.times == pytest.approx(0.010 + 1e-4 * cost.curve.sizes)
    context, causal, trees = step_cost._cost_of(PassPlan(runner), measured[0].times).weights[-3:]
    assert causal == pytest.approx(1e-6, rel=0.1)
    assert trees == pytest.approx(1e-6, rel=0.1)
    assert context == pytest.approx(0, abs=1e-6)
    assert not any(graphs.sizes for graphs in cost.captured)

    with engine(llama, AUTO, max_num_seqs=8):
        pass
    assert len(measured) == 2 and len(list(kept.iterdir())) == 2  # another config


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass takes 10 ms, and none is made."""
    monkeypatch.setattr(timed_passes, "_seconds", lambda prepare: 0.01)


DAMAGED = ("", '{"1 tokens in pieces": -1}')


@pytest.mark.usefixtures("_nothing_runs")
def test_a_damaged_file_is_set_aside(llama, kept, measured):
    with engine(llama, AUTO):
        (file,) = kept.iterdir()
    for damaged in DAMAGED:
        file.write_text(damaged)
        with engine(llama, AUTO) as llm:
            assert drafter_of(llm).proposer.cost is not None
        assert json.loads(file.read_text()) == measured[-1].times
        (aside,) = set(kept.iterdir()) - {file}
        assert aside.read_text() == damaged
        aside.unlink()
    assert len(measured) == 1 + len(DAMAGED)


@pytest.mark.usefixtures("_timed")
def test_an_engine_starts_without_a_writable_cache(llama, kept):
    kept.write_text("a file where the folder should be")
    with engine(llama, AUTO) as llm:
        assert drafter_of(llm).proposer.cost is not None


def test_a_fixed_budget_measures_nothing(llama, kept, measured):
    with engine(llama, AUTO | {"budget": 4}) as llm:
        assert drafter_of(llm).proposer.cost is None
    assert not measured and not kept.exists()


def plan_of(passes: Any, max_model_len: int, max_num_tokens: int) -> PassPlan:
    """What is measured of these passes."""
    runner: Any = SimpleNamespace(
        forward_passes=lambda: passes,
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=64),
            model_config=SimpleNamespace(max_model_len=max_model_len),
        ),
        max_num_tokens=max_num_tokens,
        drafter=SimpleNamespace(may_branch=True, options=SimpleNamespace(chain_length=0)),
    )
    return PassPlan(runner)


@pytest.mark.parametrize("longest", [1, 8, 16, 20, 4096])
def test_no_pass_is_longer_than_max_model_len(longest):
    passes = SimpleNamespace(
        attends_in_graphs=False,
        captured_tokens=lambda: CapturedTokens(),
        decode=lambda size: None,
        decode_in_graph=None,
        drafts_in_graph=None,
        with_context=nullcontext,
    )
    plan = plan_of(passes, longest, 1024)
    assert plan.batches == [batch for batch in BATCHES if batch.rows < longest]
    assert all(0 < plan.context <= longest - batch.rows for batch in plan.batches)


class Machine:
    """Runs passes of 10, 20, 30 and 40 ms; each is `slowdown(seconds since the start)` times as
    long."""

    plan: Any = SimpleNamespace(runs={str(size): 0.01 * size for size in (1, 2, 3, 4)})

    def __init__(self, slowdown: Callable[[float], float], patch: pytest.MonkeyPatch) -> None:
        self._slowdown, self._seconds = slowdown, 0.0
        patch.setattr(timed_passes, "_seconds", self._run)
        patch.setattr(timed_passes, "time", SimpleNamespace(perf_counter=lambda: self._seconds))
        patch.setattr(timed_passes, "broadcast", lambda value: value)
        patch.setattr(timed_passes, "is_global_first_rank", lambda: False)

    def _run(self, seconds: float) -> float:
        elapsed = seconds * self._slowdown(self._seconds)
        self._seconds += elapsed
        return elapsed


@pytest.mark.parametrize("begin", [0.0, 0.2])
def test_a_program_that_disturbs_for_a_while_disturbs_no_size(begin, monkeypatch):
    """It takes two thirds of the machine for 0.4 seconds: time for four passes of one size."""
    machine = Machine(lambda now: 3.0 if begin <= now < begin + 0.4 else 1.0, monkeypatch)
    times, is_certain = measure(machine.plan)
    assert is_certain and times == pytest.approx(machine.plan.runs)


@pytest.fixture
def _slowed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A pass takes the factor in here times 10 ms, and that times the growth from pass to pass."""
    speed = {"factor": 1.0, "growth": 1.0}

    def seconds(prepare: Any) -> float:
        speed["factor"] *= speed["growth"]
        return 0.01 * speed["factor"]

    monkeypatch.setattr(timed_passes, "_seconds", seconds)
    return speed


def test_a_disturbed_measurement_is_not_kept(llama, kept, _slowed, measured, caplog):
    _slowed["growth"] = 1.2
    with engine(llama, AUTO):
        assert not kept.exists() and "other programs disturbed" in caplog.text
    _slowed["growth"] = 1.0
    with engine(llama, AUTO):
        assert len(measured) == 2 and len(list(kept.iterdir())) == 1


def test_a_kept_cost_is_replaced_if_passes_are_faster_now(llama, kept, _slowed, measured):
    """A slower pass does not count: the machine may be busy now."""
    for factor, measurements in ((5.0, 1), (5.5, 1), (1.0, 2), (5.0, 2)):
        _slowed["factor"] = factor
        with engine(llama, AUTO):
            assert len(measured) == measurements
        (file,) = kept.iterdir()
        assert json.loads(file.read_text()) == measured[-1].times
