"""Combs are sent where they bring more than they cost: for all requests of a step, or none."""

import numpy as np
import pytest

from lookahead_vllm.draft.budget.allot import PROBE_AFTER_STEPS
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost, StepWork
from lookahead_vllm.draft.hybrid import HybridProposer
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import NO_LOAD, DraftLimits, RequestOverrides, Verified
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.window.branch import NO_REQUEST, LookaheadBranch, shape_for
from lookahead_vllm.draft.window.proposer import JacobiWindowProposer

OPTIONS = LookaheadOptions(proposer="jacobi_window", window_size=7, guess_set_size=7)
CHEAP = StepCost(CostCurve([1, 256], [20.0, 22.0]))
DEAR = StepCost(CostCurve([1, 256], [20.0, 400.0]))
PROMPT = np.arange(5, 30, dtype=np.int32)


def branch_of(ids, options=OPTIONS):
    branch = LookaheadBranch(options)
    for request_id in ids:
        branch.start(request_id, PROMPT, options.window)
    return branch


def choose(branch, ids, cost, may_branch=True):
    limits = [DraftLimits(i, 128, 64, may_branch, 100) for i in ids]
    return branch.choose(limits, np.full(len(ids), 100), cost, NO_LOAD)


def join(branch, ids, numbers):
    limits = [DraftLimits(i, 128, 64) for i in ids]
    return branch.join(DraftForest.of([DraftTree.chain([])] * len(ids)), numbers, limits, 128)


def verify(branch, ids, forest, lengths=0):
    verified = Verified.nothing(ids, forest, 1)
    verified.lengths[:] = lengths
    return branch.iterate(verified, np.zeros(len(ids), np.int32))


@pytest.mark.parametrize("count", [1, 4])
def test_it_is_sent_where_tokens_are_nearly_free_and_not_where_they_are_dear(count):
    ids = [str(i) for i in range(count)]
    branch = branch_of(ids)
    assert (choose(branch, ids, CHEAP) >= 0).all()
    assert (choose(branch, ids, DEAR) == NO_REQUEST).all()
    assert (choose(branch, ids, None) >= 0).all()  # a budget is a budget


def test_a_busy_step_has_no_combs():
    """The same curve: flat up to 128 tokens, which one comb does not fill and many do."""
    cost = StepCost(CostCurve([1, 128, 256], [20.0, 20.5, 80.0]))
    few, many = ["0"], [str(i) for i in range(24)]
    assert (choose(branch_of(few), few, cost) >= 0).all()
    assert (choose(branch_of(many), many, cost) == NO_REQUEST).all()


def test_a_window_that_brings_nothing_is_given_up_and_tried_again_later():
    branch = branch_of(["r"])
    cost = StepCost(CostCurve([1, 256], [20.0, 50.0]))
    sent = []
    for _ in range(6000):
        numbers = choose(branch, ["r"], cost)
        sent.append(numbers[0] >= 0)
        if sent[-1]:
            verify(branch, ["r"], join(branch, ["r"], numbers))
    assert all(sent[:20]) and not all(sent)
    first_off = sent.index(False)
    assert any(sent[first_off:]) and np.mean(sent[first_off:]) < 0.5


def test_a_step_in_which_the_cost_of_plain_ones_is_looked_at_has_no_comb():
    options = LookaheadOptions(proposer="hybrid", window_size=4, num_speculative_tokens=32)
    proposer = HybridProposer(options, StepCost(CostCurve([1, 256], [20.0, 22.0])))
    proposer.start("r", PROMPT)
    proposer.extend({"r": [90]})  # the trie knows nothing of it
    sizes = []
    for _ in range(40):
        (tree,) = proposer.propose([DraftLimits("r", 32, 32, True, 100)])
        sizes.append(len(tree))
        proposer.cost.observe(StepWork(1 + len(tree), 1, len(tree), 100.0, 100.0, 0.0), 20.5, 0.02)
    assert sizes.count(0) == 2 and sizes[PROBE_AFTER_STEPS] == 0


def test_a_request_without_a_window_or_a_branching_tree_has_no_comb():
    branch = branch_of(["with"])
    branch.start("without", PROMPT, shape_for(OPTIONS, RequestOverrides(window_size=0)))
    assert (choose(branch, ["with", "without"], None) >= 0).tolist() == [True, False]
    assert (choose(branch, ["with"], None, may_branch=False) == NO_REQUEST).all()


def test_a_comb_that_was_lost_on_its_way_begins_anew():
    branch = branch_of(["r"])
    windows = branch.windows
    for _ in range(4):  # full
        verify(branch, ["r"], join(branch, ["r"], choose(branch, ["r"], None)))
    (number,) = windows.request_rows.numbers(["r"])
    assert windows.shapes[number].tolist() == [7, 5, 4]
    join(branch, ["r"], choose(branch, ["r"], None))  # and nobody verifies it
    choose(branch, ["r"], None)
    assert windows.shapes[number].tolist() == [7, 5, 1]


def test_no_wish_is_larger_than_the_server():
    assert shape_for(OPTIONS, RequestOverrides(window_size=99, ngram_size=3)) == (7, 3)
    assert shape_for(OPTIONS, RequestOverrides(proposer="ngram_trie")) == (0, 5)


def test_the_proposer_keeps_within_what_each_request_may_have():
    proposer = JacobiWindowProposer(OPTIONS)
    for i in range(5):
        proposer.start(str(i), PROMPT)
        proposer.extend({str(i): [6]})
    limits = [DraftLimits(str(i), nodes, depth, branch) for i, (nodes, depth, branch) in enumerate(
        [(128, 64, True), (10, 64, True), (128, 1, True), (128, 64, False), (1, 1, True)]
    )]  # fmt: skip
    forest = proposer.propose(limits)
    assert not forest.faults(100, np.array([w.max_nodes for w in limits])).any()
    depths = [int(tree.depths.max(initial=0)) for tree in forest]
    assert all(depth <= w.max_depth for depth, w in zip(depths, limits, strict=True))
    assert not forest.branching[3]
