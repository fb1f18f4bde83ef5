"""A step sends the combs of all its requests if they bring more than they cost, else none."""

import numpy as np
import pytest

from lookahead_vllm.draft.budget.captured import CapturedSizes, GraphTimes
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost, StepWork
from lookahead_vllm.draft.proposers.hybrid import HybridProposer
from lookahead_vllm.draft.proposers.jacobi_window import JacobiWindowProposer
from lookahead_vllm.draft.proposers.proposer import NO_LOAD
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.draft.window.branch import NO_WINDOW, SKIP_AFTER_STEPS, LookaheadBranch
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.valid_trees import check

OPTIONS = LookaheadOptions(proposer="jacobi_window", window_size=7)
LOW_COST = StepCost(CostCurve([1, 256], [20.0, 22.0]))
HIGH_COST = StepCost(CostCurve([1, 256], [20.0, 400.0]))
PROMPT = np.arange(5, 30, dtype=np.int32)


def branch_of(ids):
    branch = LookaheadBranch(OPTIONS.window)
    for request_id in ids:
        branch.start(request_id, PROMPT)
    return branch


def choose(branch, ids, cost, may_branch=True):
    rows = branch.rows_of(ids, np.full(len(ids), may_branch))
    return branch.choose(rows, np.full(len(ids), 100), NO_LOAD, cost)


def join(branch, ids, rows):
    forest = DraftForest.of([DraftTree.chain([])] * len(ids))
    return branch.join(forest, rows, np.full(len(ids), 128), np.full(len(ids), 64), 128)


def verify(branch, ids, forest):
    branch.iterate(Verified.nothing(ids, forest, 1))


@pytest.mark.parametrize("count", [1, 4])
def test_combs_are_sent_where_tokens_cost_little_and_not_where_they_cost_much(count):
    ids = [str(i) for i in range(count)]
    branch = branch_of(ids)
    assert (choose(branch, ids, LOW_COST) >= 0).all()
    assert (choose(branch, ids, HIGH_COST) == NO_WINDOW).all()
    assert (choose(branch, ids, None) >= 0).all()  # a fixed budget ignores the cost


def test_a_busy_step_has_no_combs():
    """With a cost that is flat up to 128 tokens, which one comb does not exceed and many do."""
    cost = StepCost(CostCurve([1, 128, 256], [20.0, 20.5, 80.0]))
    few, many = ["0"], [str(i) for i in range(24)]
    assert (choose(branch_of(few), few, cost) >= 0).all()
    assert (choose(branch_of(many), many, cost) == NO_WINDOW).all()


def test_a_comb_is_not_charged_for_the_graph_after_its_own():
    """Its 9 nodes fill a graph of 10 tokens; the next graph takes four times as long."""
    graphs = CapturedSizes(GraphTimes([1], [20.0]), GraphTimes([10, 32], [20.5, 80.0]))
    cost = StepCost(CostCurve([1, 256], [30.0, 300.0]), captured=graphs)
    assert (choose(branch_of(["r"]), ["r"], cost) >= 0).all()
    two = ["r", "s"]
    assert (choose(branch_of(two), two, cost) == NO_WINDOW).all()


def test_a_window_that_brings_nothing_is_given_up_and_tried_again_later():
    branch = branch_of(["r"])
    cost = StepCost(CostCurve([1, 256], [20.0, 50.0]))
    sent = []
    for _ in range(6000):
        rows = choose(branch, ["r"], cost)
        sent.append(rows[0] >= 0)
        if sent[-1]:
            verify(branch, ["r"], join(branch, ["r"], rows))
    assert all(sent[:20]) and not all(sent)
    first_off = sent.index(False)
    assert any(sent[first_off:]) and np.mean(sent[first_off:]) < 0.5


def test_a_plain_step_that_is_due_has_no_comb():
    options = LookaheadOptions(proposer="hybrid", window_size=4, num_speculative_tokens=32)
    proposer = HybridProposer(options)
    proposer.cost = StepCost(CostCurve([1, 256], [20.0, 22.0]))
    proposer.start("r", PROMPT)
    read(proposer, {"r": [90]})  # which is not in the trie
    sizes = []
    for _ in range(40):
        (tree,) = draft_trees(proposer, [DraftLimits("r", 32, 32, True, 100)])
        sizes.append(len(tree))
        proposer.cost.observe(StepWork(1, len(tree), 100.0, 100.0, 0.0, len(tree) > 0), 20.5)
    assert sizes.count(0) == 2 and sizes[SKIP_AFTER_STEPS] == 0


def test_a_request_without_a_window_or_a_branching_tree_has_no_comb():
    branch = branch_of(["with"])
    assert (choose(branch, ["with", "without"], None) >= 0).tolist() == [True, False]
    assert (choose(branch, ["with"], None, may_branch=False) == NO_WINDOW).all()


def test_the_window_of_a_comb_that_was_never_verified_starts_again():
    ids = ["r", *map(str, range(200))]  # the table of windows grows
    branch = branch_of(ids)
    windows = branch.windows
    for _ in range(4):  # full
        verify(branch, ["r"], join(branch, ["r"], choose(branch, ["r"], None)))
    (row,) = windows.request_rows.rows_of(["r"])
    assert windows.arrays.filled[row] == 4
    join(branch, ["r"], choose(branch, ["r"], None))  # and is not verified
    choose(branch, ["r"], None)
    assert windows.arrays.filled[row] == 1


def test_the_proposer_keeps_to_each_request_s_limits():
    proposer = JacobiWindowProposer(OPTIONS)
    for i in range(5):
        proposer.start(str(i), PROMPT)
        read(proposer, {str(i): [6]})
    limits = [DraftLimits(str(i), nodes, depth, branch) for i, (nodes, depth, branch) in enumerate(
        [(128, 64, True), (10, 64, True), (128, 1, True), (128, 64, False), (1, 1, True)]
    )]  # fmt: skip
    forest = draft_trees(proposer, limits)
    for tree, limit in zip(forest, limits, strict=True):
        check(tree, vocab_size=100, max_nodes=limit.max_nodes)
    depths = [int(tree.depths.max(initial=0)) for tree in forest]
    assert all(depth <= limit.max_depth for depth, limit in zip(depths, limits, strict=True))
    assert not forest.branching[3]


def test_a_prompt_of_embeddings_may_be_asked_for_a_draft_before_its_answer_begins():
    """It has no tokens; steps without slots grow trees as soon as a request has started."""
    proposer = JacobiWindowProposer(OPTIONS)
    proposer.start("embeddings", [])
    proposer.start("tokens", PROMPT.tolist())
    limits = [DraftLimits(i, 64, 8) for i in ("embeddings", "tokens")]
    empty, tree = draft_trees(proposer, limits)
    assert not len(empty.tokens) and len(tree.tokens)
