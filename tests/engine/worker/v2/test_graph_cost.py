"""CUDA graphs of the whole model are timed at captured sizes, with drafts and without."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu import model_runner

from lookahead_vllm.draft.budget.cost import StepWork
from lookahead_vllm.engine.worker import step_cost
from lookahead_vllm.engine.worker.v2.forward_passes import RunnerPasses
from tests.support import graph_engine, v2_on_cpu
from tests.support.driving import drafter_of, engine, runner_of

DRAFT_SIZES = [2, 4, 8, 16, 32, 48]


class Passes:
    """A pass in pieces takes 10 ms, in a graph 6, in one for drafts 7; and 0.1 for each token.

    With a context, a request takes 3 µs more for each token of it, a row of a chain 1 µs, and a row
    of a tree 2. A pass in a graph has the graph's requests.
    """

    attends_in_graphs = True

    def __init__(self, captured: step_cost.CapturedTokens) -> None:
        self.captured = captured
        self.ran: list[tuple[str, int, float]] = []

    def captured_tokens(self) -> step_cost.CapturedTokens:
        return self.captured

    def decode(self, num_tokens: int, attends: bool) -> None:
        self.ran.append(("pieces", num_tokens, 0.0))
        assert attends is bool(self.captured.without_drafts or self.captured.with_drafts)

    def decode_in_graph(self, num_tokens: int) -> None:
        self.ran.append(("plain", num_tokens, 0.0))

    def drafts_in_graph(self, num_tokens: int) -> None:
        self.ran.append(("drafts", num_tokens, 0.0))

    def with_context(self, batch: Any, context: int, in_graph: bool) -> Any:
        requests, tokens = batch.requests, batch.requests * batch.rows
        kind = "pieces"
        if in_graph:
            kind, sizes = "plain", self.captured.without_drafts
            if batch.rows > 1:
                kind, sizes = "drafts", self.captured.with_drafts
            requests = tokens = min(size for size in sizes if size >= tokens)
        attention = context * (3e-6 * requests + (2e-6 if batch.trees else 1e-6) * tokens)
        return nullcontext(lambda: self.ran.append((kind, tokens, attention)))


def facts_of(monkeypatch: pytest.MonkeyPatch, passes: Passes) -> dict[str, Any]:
    def fastest(run: Any) -> float:
        run()
        kind, tokens, attention = passes.ran[-1]
        start = {"pieces": 0.010, "plain": 0.006, "drafts": 0.007}[kind]
        return start + 1e-4 * tokens + attention

    monkeypatch.setattr(step_cost, "_fastest", fastest)
    monkeypatch.setattr(step_cost, "_broadcast", lambda value: value)
    monkeypatch.setattr(step_cost, "is_global_first_rank", lambda: False)
    measured: Any = SimpleNamespace(
        forward_passes=lambda: passes,
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        max_num_tokens=512,
        max_model_len=2048,
        drafter=SimpleNamespace(may_branch=True),
    )
    return step_cost.measure(measured)


def test_graphs_are_timed_at_captured_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [1, 2, 4, *range(8, 65, 8)]
    passes = Passes(step_cost.CapturedTokens(plain, DRAFT_SIZES))
    cost = step_cost._cost_of(facts_of(monkeypatch, passes))
    ran = [(kind, n) for kind, n, attention in passes.ran if not attention]
    assert [n for kind, n in ran if kind == "plain"] == [1, 2, 4, 8, 16, 32, 64]
    assert [n for kind, n in ran if kind == "drafts"] == DRAFT_SIZES
    assert cost.captured is not None
    without, with_drafts = cost.captured
    assert without.sizes == plain and with_drafts.sizes == DRAFT_SIZES
    assert without.times == pytest.approx([0.006 + 1e-4 * size for size in plain])
    assert with_drafts.times == pytest.approx([0.007 + 1e-4 * size for size in DRAFT_SIZES])
    # A step costs what its padded size costs.
    for tokens, nodes, expected in ((5, 0, 0.0068), (9, 4, 0.0086), (60, 50, 0.016)):
        work = StepWork(tokens, tokens - nodes, nodes, context=0.0, causal=0.0, trees=0.0)
        assert cost.predict(work) == pytest.approx(expected)


@pytest.mark.parametrize(
    "sizes", [([1, 8, 32, 64], DRAFT_SIZES), ([1, 16, 64], DRAFT_SIZES), ([], [])]
)
def test_attention_is_what_a_context_adds_to_the_same_batch(
    sizes: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(monkeypatch, Passes(step_cost.CapturedTokens(*sizes)))
    assert facts["context"] == pytest.approx(3e-6)
    assert facts["causal"] == pytest.approx(1e-6) and facts["trees"] == pytest.approx(2e-6)


def test_without_graphs_there_is_one_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(monkeypatch, Passes(step_cost.CapturedTokens()))
    assert step_cost._cost_of(facts).captured is None
    assert facts["graphs_with_drafts"] == facts["graphs_without_drafts"] == [[], []]


def test_sizes_that_were_not_timed_in_time_have_no_graph() -> None:
    assert step_cost._of_all_sizes([1, 2, 4, 8, 16], {1: 1.0, 4: 4.0}) == [[1, 2, 4], [1, 2, 4]]
    assert step_cost._about_doubling([1, 2, 4, 8, 16, 24, 32, 40]) == [1, 2, 4, 8, 16, 32, 40]
    assert step_cost._about_doubling([3]) == [3] and step_cost._about_doubling([]) == []


def test_passes_over_drafts_and_over_full_graphs() -> None:
    ran: list[tuple[int, int]] = []
    device: Any = SimpleNamespace(max_num_reqs=16, attends_in_graphs=lambda: True)
    passes = RunnerPasses(device)
    passes.__dict__["_run"] = lambda tokens: ran.append((tokens, device.max_num_reqs))
    for tokens in (2, 8, 48):
        passes.drafts_in_graph(tokens)
    passes.decode_in_graph(24)
    assert ran == [(2, 1), (8, 4), (48, 16), (16, 16)] and device.max_num_reqs == 16


def test_an_engine_times_the_graphs_that_it_has_captured(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path))
    monkeypatch.setattr(step_cost, "envs", cache)
    monkeypatch.setattr(step_cost, "MAX_SECONDS", float("inf"))
    graph_engine.enable(monkeypatch)
    attended: list[tuple[int, int]] = []
    set_dummy_context = model_runner.set_dummy_context

    def watched(batch: Any, *args: Any, **kwargs: Any) -> None:
        attended.append((batch.num_reqs, batch.num_tokens))
        set_dummy_context(batch, *args, **kwargs)

    monkeypatch.setattr(model_runner, "set_dummy_context", watched)
    with v2_on_cpu.enabled(), engine(llama, {"proposer": "ngram_trie"}) as llm:
        captured = drafter_of(llm).proposer.cost.captured
        assert captured.without_drafts.sizes == [1, 2, 4, 8, 16]
        assert captured.with_drafts.sizes == graph_engine.SIZES[1:]
        replays = runner_of(llm).replays
        for for_drafts, sizes in ((False, [1, 2, 4, 8, 16]), (True, graph_engine.SIZES[1:])):
            ran = [tokens for tokens, drafts, _ in replays if drafts is for_drafts]
            assert sorted(set(ran)) == sizes and len(ran) >= 4 * len(sizes)
        batches = [batch for batch in step_cost.BATCHES if batch.requests <= 16]
        assert attended == [(b.requests, b.requests * b.rows) for b in batches for _ in range(4)]
        in_graphs = [batch for batch in batches if batch.rows == 1]
        assert len(replays) == 4 * (5 + len(graph_engine.SIZES[1:]) + len(in_graphs))
