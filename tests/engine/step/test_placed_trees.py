"""The arrays of a step with drafts, without an engine."""

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.step.placed_trees import NO_DRAFTS, PlacedTrees, root_rows
from lookahead_vllm.verify.choices import pack_choices

CHAIN = DraftTree.chain([5, 6])
TREE = DraftTree.from_lists([7, 8, 9], [-1, 0, -1])


def of_scheduled(order: list[int]) -> PlacedTrees:
    """Row 0 reads two tokens of its prompt before its root, row 1 has no draft, row 2 a tree."""
    trees, rows, own = [CHAIN, TREE], np.array([0, 2]), np.array([False, True])
    forest = DraftForest.of([trees[i] for i in order])
    scheduled, computed = np.array([5, 1, 4], np.int32), np.array([10, 20, 30], np.int32)
    return PlacedTrees.of_scheduled(forest, own[order], rows[order], scheduled, computed)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_drafts_are_placed_in_the_order_of_the_batch(order):
    step = of_scheduled(order)
    assert step.rows.tolist() == [0, 2] and step.from_proposer.tolist() == [False, True]
    assert step.starts.tolist() == [2, 6] and step.contexts.tolist() == [12, 30]
    assert step.branches and step.trees().requests.tolist() == [2]


def test_tree_attention_may_compute_chains():
    step = of_scheduled([0, 1])
    trees = step.trees(with_chains=True)  # a prompt is before row 0's chain
    assert trees is not None
    assert trees.requests.tolist() == [2] and trees.sizes.tolist() == [4]
    assert trees.starts.tolist() == [6] and trees.contexts.tolist() == [30]
    dummies = PlacedTrees.of_dummies([DraftTree.chain([]), CHAIN], 100)
    assert dummies.trees(with_chains=True).requests.tolist() == [1]
    assert NO_DRAFTS.trees(with_chains=True) is None


def test_a_tree_has_the_tokens_before_its_root_as_a_chain():
    trees = DraftForest.of([TREE, TREE])
    own, rows = np.array([True, True]), np.array([0, 1])
    scheduled, computed = np.array([6, 4], np.int32), np.array([30, 50], np.int32)
    step = PlacedTrees.of_scheduled(trees, own, rows, scheduled, computed)
    assert step.contexts.tolist() == [32, 50]
    batch = step.trees()
    assert batch.starts.tolist() == [0, 6] and batch.contexts.tolist() == [30, 50]
    assert batch.sizes.tolist() == [6, 4]
    assert batch.depths.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 1]
    masks = [0b1, 0b11, 0b111, 0b1111, 0b11111, 0b100111, 0b1, 0b11, 0b111, 0b1001]
    assert batch.masks[:, 0].tolist() == masks


def test_choices_are_of_the_proposers_trees_and_of_roots_that_are_wanted():
    step = of_scheduled([0, 1])
    num_nodes = np.array([2, 0, 3])
    assert root_rows(num_nodes).tolist() == [0, 3, 4]
    logits = torch.zeros(8, 16)
    logits[torch.arange(8), torch.arange(8)] = 1.0  # row i chooses token i
    packed = pack_choices(logits, 1)
    verified = step.collect_choices(packed, num_nodes, ["x", "y", "z"], {"y"})
    assert verified is not None and verified.request_ids == ["z", "y"]
    assert verified.at_roots.tolist() == [[4], [3]]
    assert verified.at_nodes.tolist() == [[5], [6], [7]]
    step.mark_accepted(verified, np.array([[0, 1], [0, 1]], np.int32))
    assert verified.accepted.tolist() == [True, True, False]
    assert NO_DRAFTS.collect_choices(packed, np.zeros(3, np.int64), ["x", "y", "z"]) is None
