"""A step sends the nodes that emit the most tokens per unit of cost."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_vllm.draft.budget import CostCurve, cut

FLAT = CostCurve([8, 16], [1, 2])
CPU = CostCurve([1, 2, 4, 8, 16, 32, 64], [25, 25, 25, 32, 49, 74, 129])


def tree_probs(*rows):
    return [np.array(row, np.float32) for row in rows]


def test_the_curve_passes_through_its_points_and_goes_on_with_the_last_slope():
    curve = CostCurve([2, 4, 8], [10, 20, 60])
    assert curve(np.array([1, 2, 3, 8, 10])).tolist() == [10, 10, 15, 60, 80]


def test_noise_never_makes_more_tokens_cheaper():
    assert CostCurve([1, 2, 4], [10, 9, 12])(np.array([1, 2, 3])).tolist() == [10, 10, 11]


def test_one_point_is_a_constant_cost():
    assert CostCurve([1], [7])(np.array([1, 100])).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("sizes", "times"),
    [([], []), ([1], [1, 2]), ([2, 2], [1, 2]), ([0, 1], [1, 2]), ([1], [0]), ([1], [np.nan])],
)
def test_what_is_no_curve_is_refused(sizes, times):
    with pytest.raises(ValueError):
        CostCurve(sizes, times)


def test_below_the_critical_decoding_length_every_node_is_worth_it():
    assert cut(tree_probs([0.5, 0.1], [0.02]), FLAT) == [2, 1]


def test_a_full_step_sends_nothing():
    assert cut(tree_probs([0.9, 0.9], [0.9]), FLAT, num_plain_tokens=1000) == [2, 1]
    assert cut(tree_probs([0.2, 0.1]), CostCurve([1, 2], [1, 2])) == [0]


def test_nodes_go_to_the_request_that_gains_most():
    assert cut(tree_probs([0.95, 0.9, 0.85, 0.8], [0.1, 0.05]), CPU) == [4, 0]


def test_no_requests_no_nodes():
    assert cut([], CPU) == []


def test_an_empty_tree_keeps_nothing():
    assert cut(tree_probs([], [0.9]), CPU) == [0, 1]


probs = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda p: sorted(p, reverse=True))
curves = st.lists(st.floats(0.1, 100), min_size=1, max_size=6).map(
    lambda times: CostCurve([2**i for i in range(len(times))], times)
)


@given(st.lists(probs, min_size=1, max_size=4), curves, st.integers(0, 20))
def test_no_other_prefixes_emit_more_per_cost(rows, curve, plain):
    rows = tree_probs(*rows)

    def gain(sizes):
        kept = [row[:n].sum(dtype=float) for row, n in zip(rows, sizes, strict=True)]
        return (len(rows) + sum(kept)) / float(curve(len(rows) + plain + sum(sizes)))

    kept = cut(rows, curve, plain)
    best = max(gain(sizes) for sizes in product(*(range(len(r) + 1) for r in rows)))
    assert gain(kept) == pytest.approx(best)


def test_the_overhead_is_learned_and_hiccups_are_not() -> None:
    curve = CostCurve([1, 8], [10.0, 17.0])
    assert curve(4) == 13.0
    for _ in range(400):
        curve.observe(4, 15.0)
    assert curve.overhead == pytest.approx(2.0, rel=1e-2)
    assert curve(4) == pytest.approx(15.0, rel=1e-2)
    curve.observe(4, 1000.0)
    curve.observe(9, 1000.0)
    assert curve.overhead < 2.5
