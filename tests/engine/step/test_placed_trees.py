"""The arrays of a step with drafts, without an engine."""

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.step.drafts import Drafts
from lookahead_vllm.engine.step.placed_trees import NO_DRAFTS, PlacedTrees
from lookahead_vllm.verify.choices import Choices, pack_choices
from lookahead_vllm.verify.layout.node_layout import rows_of_nodes

CHAIN = DraftTree.chain([5, 6])
TREE = DraftTree.from_lists([7, 8, 9], [-1, 0, -1])


def in_batch(order: list[int]) -> PlacedTrees:
    """Row 0 has a chain, row 1 no draft, row 2 a tree."""
    trees, req_ids, num_tokens, own = [CHAIN, TREE], "xz", np.array([13, 31]), np.array([0, 1])
    forest = DraftForest.of([trees[i] for i in order])
    drafts = Drafts([req_ids[i] for i in order], forest, num_tokens[order], own[order] == 1)
    return drafts.in_batch(["x", "y", "z"], np.array([3, 1, 4], np.int32))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_drafts_are_placed_in_the_order_of_the_batch(order):
    step = in_batch(order)
    assert step.rows.tolist() == [0, 2] and step.from_proposer.tolist() == [False, True]
    assert step.starts.tolist() == [0, 4] and step.contexts.tolist() == [12, 30]
    assert step.branches and step.trees().requests.tolist() == [2]


def test_tree_attention_may_compute_chains():
    trees = in_batch([0, 1]).trees(with_chains=True)
    assert trees is not None
    assert trees.requests.tolist() == [0, 2] and trees.sizes.tolist() == [3, 4]
    assert trees.starts.tolist() == [0, 4] and trees.contexts.tolist() == [12, 30]
    dummies = PlacedTrees.of_dummies([DraftTree.chain([]), CHAIN], 100)
    assert dummies.trees(with_chains=True).requests.tolist() == [1]
    assert NO_DRAFTS.trees(with_chains=True) is None


def test_choices_are_of_the_proposers_trees_and_of_roots_that_are_wanted():
    step = in_batch([0, 1])
    starts = np.array([0, 3, 4, 8])
    logits = torch.zeros(8, 16)
    logits[torch.arange(8), torch.arange(8)] = 1.0  # row i chooses token i
    choices = Choices.on_host(pack_choices(logits, 1))
    verified = step.verified(choices, starts, ["x", "y", "z"], {"y"})
    assert verified is not None and verified.request_ids == ["z", "y"]
    forest, roots = verified.forest, verified.roots
    assert verified.tokens[roots].tolist() == [[4], [3]]
    nodes = roots[forest.owners] + 1 + forest.places
    assert verified.tokens[nodes].tolist() == [[5], [6], [7]]
    step.mark_accepted(verified, np.array([[0, 1], [0, 1]], np.int32))
    assert verified.accepted.tolist() == [True, True, False]
    assert NO_DRAFTS.verified(choices, np.arange(4), ["x", "y", "z"]) is None


def test_padding_takes_the_place_of_missing_nodes():
    forest = DraftForest.of([DraftTree.from_lists([5, 6], [-1, -1]), DraftTree.chain([])])
    drafts = Drafts(["a", "b"], forest, np.array([10, 20]))
    padded = drafts.padded({"a": [-1] * 4, "b": [-1] * 2, "c": [-1]})
    assert padded.req_ids == ["a", "b", "c"] and padded.num_tokens.tolist() == [10, 20, 0]
    forest = padded.forest
    assert forest.tokens.tolist() == [5, 6, 0, 0, 0, 0, 0]
    assert forest.parents.tolist() == [-1, -1, 1, 2, -1, 0, -1]
    assert forest.depths.tolist() == [1, 1, 2, 3, 1, 2, 1] and forest.sizes.tolist() == [4, 2, 1]
    assert forest.probs.tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert forest.branching.tolist() == [True, False, False]
    rows, tokens, shifts = rows_of_nodes(forest.arrays, np.array([0, 5, 8], np.int32)).tolist()
    assert rows == [1, 2, 3, 4, 6, 7, 9] and tokens == forest.tokens.tolist()
    assert shifts == [0, -1, -1, -1, 0, 0, 0]
    assert forest.padded(forest.sizes) is forest
