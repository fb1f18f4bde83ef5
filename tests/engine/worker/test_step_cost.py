"""The cost of a step is measured once and cached; damaged or foreign files are not used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.engine.worker import step_cost
from lookahead_vllm.engine.worker.step_cost import BATCHES, Batch
from lookahead_vllm.engine.worker.v1.forward_passes import RunnerPasses
from tests.support.driving import drafter_of, engine, generate, random_prompts, runner_of

AUTO = {"proposer": "ngram_trie"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines keep what they measured."""
    monkeypatch.setattr(step_cost, "envs", SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path)))
    monkeypatch.setattr(step_cost, "MAX_SECONDS", float("inf"))  # all is measured, however slowly
    return tmp_path / "lookahead_step_cost"


@pytest.fixture
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are made, and take 10 ms, 0.1 more for each token, 1 µs for each token that a row
    attends to; a graph of the whole model saves 3 ms."""

    last: dict[str, Any] = {}
    original = RunnerPasses._run

    def note(self: RunnerPasses, num_tokens: int, **options: Any) -> None:
        last.clear()
        last.update(num_tokens=num_tokens, **options)
        original(self, num_tokens, **options)

    def time_of(run: Any) -> float:
        run()
        pass_ = 0.007 if last.get("uniform_decode") else 0.010
        return pass_ + last["num_tokens"] * (1e-4 + 1e-6 * (last["profile_seq_lens"] - 1))

    monkeypatch.setattr(RunnerPasses, "_run", note)
    monkeypatch.setattr(step_cost, "_fastest", time_of)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every measurement that is made."""
    found: list[dict[str, Any]] = []
    original = step_cost.measure

    def measure(runner: Any) -> dict[str, Any]:
        found.append(original(runner))
        return found[-1]

    monkeypatch.setattr(step_cost, "measure", measure)
    return found


@pytest.mark.usefixtures("_timed")
def test_an_engine_measures_once(llama: Path, kept: Path, measured: list[dict[str, Any]]) -> None:
    prompts = random_prompts(3, 30)
    with engine(llama) as plain:
        vanilla = generate(plain, prompts)
    for _ in range(2):
        with engine(llama, AUTO, drafts=None) as llm:
            cost = drafter_of(llm).proposer.cost
            assert cost is not None and cost.curve.sizes.tolist() == [2**i for i in range(9)]
            # The dummy runs left nothing behind.
            runner = runner_of(llm)
            assert runner.scheduler_config.max_num_seqs == 16
            assert not runner.input_batch.block_table.block_tables[0].block_table.np.any()
            assert generate(llm, prompts) == vanilla
    assert len(measured) == 1
    (file,) = kept.iterdir()
    facts = json.loads(file.read_text())
    assert facts == measured[0]
    assert facts["times"] == pytest.approx([0.010 + 1e-4 * size for size in facts["sizes"]])
    assert facts["causal"] == pytest.approx(1e-6, rel=0.1)
    assert facts["trees"] == pytest.approx(1e-6, rel=0.1)
    assert facts["context"] == pytest.approx(0, abs=1e-6)
    assert facts["graphs_without_drafts"] == facts["graphs_with_drafts"] == [[], []]

    with engine(llama, AUTO, max_num_seqs=8):
        pass
    assert len(measured) == 2 and len(list(kept.iterdir())) == 2  # another config


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass takes 10 ms, and none is made."""
    monkeypatch.setattr(step_cost, "_fastest", lambda run: 0.01)


DAMAGED = (
    "",
    "[1, 2]",
    '{"sizes": [1], "times": [-1], "graphs_without_drafts": [[], []], '
    '"graphs_with_drafts": [[], []], "context": 0, "causal": 0, "trees": 0}',
)


@pytest.mark.usefixtures("_nothing_runs")
def test_a_damaged_file_is_set_aside(
    llama: Path, kept: Path, measured: list[dict[str, Any]]
) -> None:
    with engine(llama, AUTO):
        (file,) = kept.iterdir()
    for damaged in DAMAGED:
        file.write_text(damaged)
        with engine(llama, AUTO) as llm:
            assert drafter_of(llm).proposer.cost is not None
        assert json.loads(file.read_text()) == measured[-1]
        (aside,) = set(kept.iterdir()) - {file}
        assert aside.read_text() == damaged
        aside.unlink()
    assert len(measured) == 1 + len(DAMAGED)


@pytest.mark.usefixtures("_timed")
def test_an_engine_starts_without_a_writable_cache(llama: Path, kept: Path) -> None:
    kept.write_text("a file where the folder should be")
    with engine(llama, AUTO) as llm:
        assert drafter_of(llm).proposer.cost is not None
        facts = step_cost.measure(runner_of(llm))
        assert facts["sizes"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
        assert facts["times"] == pytest.approx([0.010 + 1e-4 * size for size in facts["sizes"]])
        assert facts["graphs_without_drafts"] == facts["graphs_with_drafts"] == [[], []]


@pytest.mark.usefixtures("_nothing_runs")
def test_a_source_tree_has_a_version_too(
    llama: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name == "lookahead-vllm":
            raise metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)
    with engine(llama, AUTO):
        assert len(list(kept.iterdir())) == 1


@pytest.mark.usefixtures("_nothing_runs")
def test_files_that_others_could_write_are_not_read(
    llama: Path,
    kept: Path,
    measured: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine(llama, AUTO):
        (file,) = kept.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and kept.stat().st_mode & 0o777 == 0o700
    file.chmod(0o666)
    with engine(llama, AUTO):
        assert len(measured) == 2 and json.loads(file.read_text()) == measured[1]
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with engine(llama, AUTO):
        assert len(measured) == 3
    assert not [text for text in caplog.messages if "Lookahead" in text]


def test_a_fixed_budget_measures_nothing(
    llama: Path, kept: Path, measured: list[dict[str, Any]]
) -> None:
    with engine(llama, AUTO | {"budget": 4}) as llm:
        assert drafter_of(llm).proposer.cost is None
    assert not measured and not kept.exists()


def test_attention_is_separated_from_the_forward_pass() -> None:
    curve = CostCurve([1, 64], [0.010, 0.073])

    def timed(batch: Batch) -> tuple[Batch, float, float]:
        rows = batch.requests * batch.rows
        without_context, row = float(curve(rows)), 2e-6 if batch.trees else 1e-6
        attention = 1000 * (5e-6 * batch.requests + rows * row)
        return batch, without_context + attention, without_context

    read, causal, trees = step_cost._fit([timed(b) for b in BATCHES], 1000)
    assert read == pytest.approx(5e-6, rel=1e-3)
    assert causal == pytest.approx(1e-6, rel=1e-3)
    assert trees == pytest.approx(2e-6, rel=1e-3)
    chains = [timed(b) for b in BATCHES if not b.trees]
    assert step_cost._fit(chains, 1000)[2] == pytest.approx(1e-6, rel=1e-3)
    assert step_cost._fit([], 1000) == (0, 0, 0)


@pytest.mark.parametrize("longest", [1, 8, 16, 20, 4096])
def test_no_pass_is_longer_than_max_model_len(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Batch] = []

    @contextmanager
    def with_context(batch: Batch, context: int, in_graph: bool) -> Iterator[Callable[[], None]]:
        assert 0 < context <= longest - batch.rows
        measured.append(batch)
        yield lambda: None

    passes = SimpleNamespace(
        attends_in_graphs=False,
        captured_tokens=lambda: step_cost.CapturedTokens(),
        decode=lambda size, attends: None,
        decode_in_graph=None,
        drafts_in_graph=None,
        with_context=with_context,
    )
    runner = SimpleNamespace(
        forward_passes=lambda: passes,
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=64),
            model_config=SimpleNamespace(max_model_len=longest),
        ),
        max_num_tokens=1024,
        drafter=SimpleNamespace(may_branch=True, options=SimpleNamespace(chain_length=0)),
    )
    monkeypatch.setattr(step_cost, "is_global_first_rank", lambda: False)
    monkeypatch.setattr(step_cost, "_broadcast", lambda value: True)
    monkeypatch.setattr(step_cost, "_fastest", lambda run: run() or 0.01)
    step_cost.measure(runner)
    assert measured == [batch for batch in BATCHES if batch.rows < longest]
