"""A step that runs as a captured graph costs what its padded size costs."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.budget.captured import CapturedSizes, GraphTimes
from lookahead_vllm.draft.budget.cost import CostCurve, Load, StepCost, StepWork
from tests.support.allotment import allot, allot_chains, chains

OUTSIDE = CostCurve([1, 256], [13.0, 20.65])  # 0.03 a token
PLAIN = GraphTimes([1, 2, 4, 8, 16], [8.0, 8.0, 8.2, 8.4, 9.0])
DRAFTS = GraphTimes([8, 16, 32, 64], [8.5, 9.1, 10.2, 12.0])
GPU = CapturedSizes(PLAIN, DRAFTS)


def work(requests, nodes):
    return StepWork(requests, nodes, 0.0, 0.0, 0.0, waits=nodes > 0)


def test_a_pass_costs_what_the_smallest_graph_costs_that_holds_it():
    curve = OUTSIDE.with_graphs(DRAFTS)
    assert curve(np.array([1, 8, 9, 16, 17, 64])).tolist() == [8.5, 8.5, 9.1, 9.1, 10.2, 12.0]
    assert float(curve(33)) == 12.0
    assert curve(np.array([65, 300])).tolist() == OUTSIDE(np.array([65, 300])).tolist()
    assert curve.between(8, 9).tolist() == [8.5, 9.1]
    assert OUTSIDE.with_graphs(GraphTimes())(np.array([1, 70])).tolist() == (
        OUTSIDE(np.array([1, 70])).tolist()
    )


@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_the_padded_size_is_the_graphs(tokens):
    assert DRAFTS.padded(tokens) == {1: 8, 8: 8, 9: 16, 64: 64}[tokens]


def test_noise_never_makes_a_larger_graph_cheaper():
    assert GraphTimes([1, 2, 4], [3.0, 2.9, 4.0]).times.tolist() == [3.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("step", "time"),
    [
        (work(1, 0), 8.0),
        (work(3, 0), 8.2),
        (work(17, 0), 13.48),
        (work(1, 1), 8.5),
        (work(3, 6), 9.1),
        (work(32, 33), 14.92),
    ],
)
def test_the_graph_depends_on_drafts(step, time):
    assert StepCost(OUTSIDE, captured=GPU).predict(step) == pytest.approx(time)


def test_a_plateau_is_filled_and_a_jump_needs_enough_nodes():
    cost = StepCost(OUTSIDE, captured=GPU)
    # From 8.0 without drafts to 8.5 with up to 7 nodes: 0.5 / 8 = 0.0625 tokens pay for all.
    assert allot_chains([[0.03] * 7], cost).forest.sizes.tolist() == [7]
    assert allot_chains([[0.06]], cost).forest.sizes.tolist() == [0]
    # From 8 to 16 tokens it is 0.6; one node more does not pay for it, and 8 do.
    assert allot_chains([[0.9] * 7 + [0.3] * 1], cost).forest.sizes.tolist() == [7]
    assert allot_chains([[0.9] * 7 + [0.3] * 8], cost).forest.sizes.tolist() == [15]
    # The last node of a plateau is free; the next one is the first of 10.2.
    assert allot_chains([[0.9] * 7 + [0.3] * 7 + [0.001] * 20], cost).forest.sizes.tolist() == [15]


def test_prompts_and_large_batches_run_outside_the_graphs():
    cost, curve = StepCost(OUTSIDE, captured=GPU), StepCost(OUTSIDE)
    rows = [[0.9, 0.5, 0.2, 0.1, 0.01, 0.002]] * 3
    for decodes, prefill in ((3, 5), (3, 100), (73, 0), (73, 5)):
        contexts, load = np.zeros(decodes, np.int64), Load(prefill=prefill)
        given, expected = cost.prices(contexts, load, 18), curve.prices(contexts, load, 18)
        assert given.forward.tolist() == expected.forward.tolist()
        assert given.captured is expected.captured is False
    assert allot_chains(rows, cost, Load(prefill=100)).forest.sizes.sum() > 0


def test_nodes_that_fill_the_plateau_are_grown_again():
    """The proposer leaves out nodes below half of `min_prob` in the next step."""
    cost = StepCost(OUTSIDE, captured=GPU)
    allotment = allot_chains([[0.9] * 7 + [0.3] * 4 + [0.01] * 60], cost)
    assert allotment.forest.sizes.tolist() == [15]
    assert allotment.min_prob <= 0.01
    # Nothing was left out, so the next step may have less likely nodes.
    assert allot_chains([[0.9] * 7], cost).min_prob == 0
    # The next plateau has 16 nodes for 1.1; those shown here are not all that could fill it.
    rate = allot_chains([[0.9] * 15], cost).rate
    shown = allot_chains([[0.9] * 15 + [0.1]], cost)
    assert shown.forest.sizes.tolist() == [15]
    assert shown.min_prob == pytest.approx(rate * 1.1 / 16, rel=1e-5)


probabilities = st.lists(st.floats(0.0078125, 1.0, width=32), max_size=5).map(
    lambda p: sorted(p, reverse=True)
)
curves = st.lists(st.floats(0.1, 100), min_size=1, max_size=6).map(
    lambda times: CostCurve([2**i for i in range(len(times))], times)
)
graphs = st.dictionaries(st.integers(1, 40), st.floats(0.1, 100), max_size=6).map(
    lambda points: GraphTimes(sorted(points), [points[size] for size in sorted(points)])
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(probabilities, st.integers(0, 3000)), min_size=1, max_size=4),
    curves,
    st.tuples(graphs, graphs),
    st.integers(0, 20),
    st.floats(0, 0.01),
    st.sampled_from([0.0, 0.1, 20.0]),
)
def test_no_other_prefixes_emit_more_per_unit_of_time(
    requests, curve, captured, plain, attention, drafts
):
    rows = [row for row, _ in requests] + [[]] * plain
    contexts = np.array([context for _, context in requests] + [0] * plain)
    cost = StepCost(
        curve, 3 * attention, attention, attention, drafts, captured=CapturedSizes(*captured)
    )
    chosen = allot(chains(*rows), contexts, cost, Load()).forest.sizes.tolist()

    def rate(sizes):
        emitted = len(rows) + sum(sum(r[:n]) for r, n in zip(rows, sizes, strict=True))
        causal = float(contexts @ [1 + n for n in sizes])
        waits = sum(sizes) > 0
        step = StepWork(len(rows), sum(sizes), float(contexts.sum()), causal, 0.0, waits)
        return emitted / cost.predict(step)

    best = max(rate(sizes) for sizes in product(*(range(len(r) + 1) for r in rows)))
    assert rate(chosen) == pytest.approx(best, rel=1e-5)
