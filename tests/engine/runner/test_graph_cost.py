"""CUDA graphs of the whole model are timed at captured sizes, with drafts and without."""

from contextlib import nullcontext
from typing import Any

import pytest

from lookahead_vllm.draft.budget.cost import StepCost, StepWork
from lookahead_vllm.engine.cost import measure as step_cost
from lookahead_vllm.engine.cost import timed_passes
from lookahead_vllm.engine.cost.timed_passes import CapturedTokens, measure
from tests.engine.cost.test_measure import plan_of

DRAFT_SIZES = [2, 4, 8, 16, 32, 48]


class Passes:
    """A pass in pieces takes 10 ms, in a graph 6, in one for drafts 7; and 0.1 for each token.

    With a context, a request takes 3 µs more for each token of it, a row of a chain 1 µs, and a row
    of a tree 2. A pass in pieces with trees takes 4 ms more, for the launches of tree attention.
    """

    def __init__(self, captured: CapturedTokens, attends_in_graphs: bool = True) -> None:
        self.captured = captured
        self.attends_in_graphs = attends_in_graphs
        self.ran: list[tuple[str, int, float]] = []

    def captured_tokens(self) -> CapturedTokens:
        return self.captured

    def decode(self, num_tokens: int) -> None:
        self.ran.append(("pieces", num_tokens, 0.0))

    def decode_in_graph(self, num_tokens: int) -> None:
        self.ran.append(("plain", num_tokens, 0.0))

    def drafts_in_graph(self, num_tokens: int) -> None:
        self.ran.append(("drafts", num_tokens, 0.0))

    def with_context(self, batch: Any, context: int, in_graph: bool) -> Any:
        tokens, kind = batch.num_tokens, "pieces"
        attention = context * (3e-6 * batch.requests + (2e-6 if batch.trees else 1e-6) * tokens)
        if in_graph and batch.rows == 1:
            assert self.attends_in_graphs and tokens in self.captured.without_drafts
            kind = "plain"
        elif in_graph:
            assert batch.rows <= self.captured.longest
            assert self.attends_in_graphs or batch.trees
            kind, tokens = "drafts", min(s for s in self.captured.with_drafts if s >= tokens)
        elif batch.trees:
            attention += 0.004
        return nullcontext(lambda: self.ran.append((kind, tokens, attention)))


def cost_of(monkeypatch: pytest.MonkeyPatch, passes: Passes) -> StepCost:
    def seconds(prepare: Any) -> float:
        with prepare() as run:
            run()
        kind, tokens, attention = passes.ran[-1]
        start = {"pieces": 0.010, "plain": 0.006, "drafts": 0.007}[kind]
        return start + 1e-4 * tokens + attention

    monkeypatch.setattr(timed_passes, "_seconds", seconds)
    monkeypatch.setattr(timed_passes, "broadcast", lambda value: value)
    monkeypatch.setattr(timed_passes, "is_global_first_rank", lambda: False)
    plan = plan_of(passes, 2048, 512)
    return step_cost._cost_of(plan, measure(plan).times)


def test_graphs_are_timed_at_captured_sizes(monkeypatch):
    plain = [1, 2, 4, *range(8, 65, 8)]
    passes = Passes(CapturedTokens(plain, DRAFT_SIZES, 17))
    cost = cost_of(monkeypatch, passes)
    ran = [(kind, n) for kind, n, attention in passes.ran if not attention]
    rounds = timed_passes.MIN_ROUNDS
    assert [n for kind, n in ran if kind == "plain"] == [1, 2, 4, 8, 16, 32, 64] * rounds
    assert [n for kind, n in ran if kind == "drafts"] == DRAFT_SIZES * rounds
    without, with_drafts = cost.captured
    assert without.sizes == plain and with_drafts.sizes == DRAFT_SIZES
    assert without.times == pytest.approx([0.006 + 1e-4 * size for size in plain])
    assert with_drafts.times == pytest.approx([0.007 + 1e-4 * size for size in DRAFT_SIZES])
    # A step costs what its padded size costs.
    for tokens, nodes, expected in ((5, 0, 0.0068), (9, 4, 0.0086), (60, 50, 0.016)):
        work = StepWork(tokens - nodes, nodes, context=0.0, causal=0.0, trees=0.0, waits=nodes > 0)
        assert cost.predict(work) == pytest.approx(expected)


@pytest.mark.parametrize("attends_in_graphs", [True, False])
@pytest.mark.parametrize("longest", [6, 65])
@pytest.mark.parametrize(
    "sizes", [([1, 8, 32, 64], DRAFT_SIZES), ([1, 16, 64], DRAFT_SIZES), ([1, 8], [3, 9, 24, 64])]
)
def test_attention_is_what_a_context_adds_to_the_same_batch(
    sizes, longest, attends_in_graphs, monkeypatch
):
    """Trees are timed in the graphs that run them: there, a launch costs no time of the host."""
    passes = Passes(CapturedTokens(*sizes, longest), attends_in_graphs)
    cost = cost_of(monkeypatch, passes)
    assert cost.weights[-3:] == pytest.approx([3e-6, 1e-6, 2e-6])


def test_without_graphs_trees_are_timed_as_they_run(monkeypatch):
    cost = cost_of(monkeypatch, Passes(CapturedTokens()))
    assert not any(graphs.sizes for graphs in cost.captured)
    _, causal, trees = cost.weights[-3:]
    assert causal == pytest.approx(1e-6, rel=0.2) and trees > 2.1e-6


def test_sizes_that_were_not_timed_in_time_have_no_graph():
    graphs = step_cost._of_all_sizes([1, 2, 4, 8, 16], {1: 1.0, 4: 4.0})
    assert graphs.sizes == graphs.times.tolist() == [1, 2, 4]
    assert timed_passes._about_doubling([1, 2, 4, 8, 16, 24, 32, 40]) == [1, 2, 4, 8, 16, 32, 40]
    assert timed_passes._about_doubling([3]) == [3] and timed_passes._about_doubling([]) == []
