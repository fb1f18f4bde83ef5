"""Accepted paths follow the target model's choices, as far as the tree goes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.verify.acceptance import accepted_paths, tally


def accepted_path(tree: DraftTree, choices: list[int]) -> list[int]:
    """The accepted path of `tree`, verified in a forest between two other trees."""
    forest = DraftForest.of([DraftTree.chain([9]), tree, DraftTree.chain([9, 9])])
    at_nodes = np.array([9, *choices[1:], 9, 9], np.int32)
    paths = accepted_paths(forest, np.array([9, choices[0], 8], np.int32), at_nodes)
    assert [node for node in paths[0].tolist() if node >= 0] == [0]
    assert (paths[2] == -1).all()
    return [node for node in paths[1].tolist() if node >= 0]


@st.composite
def trees_with_choices(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, i - 1))
        token = draw(st.integers(0, 4))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
        else:  # a token of its own, so that siblings differ
            parents.append(parent)
            tokens.append(100 + i)
    choices = draw(st.lists(st.integers(0, 4), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    return DraftTree.from_lists(tokens, parents), choices


@settings(deadline=None)  # the first example compiles
@given(trees_with_choices())
def test_the_path_follows_the_choices_as_far_as_the_tree_goes(case):
    tree, choices = case
    path = accepted_path(tree, choices)
    parent, token = -1, choices[0]
    for node in path:
        assert tree.parents[node] == parent
        assert tree.tokens[node] == token
        parent, token = node, choices[node + 1]
    children = [int(tree.tokens[i]) for i in range(len(tree)) if tree.parents[i] == parent]
    assert token not in children


def test_nodes_are_counted_by_source_and_those_that_move():
    """Nodes 0 and 1 of the chain follow the root; node 2 of the other tree does not."""
    trees = [DraftTree.chain([5, 6]), DraftTree.from_lists([1, 2, 3, 4], [-1, -1, -1, 2])]
    forest = DraftForest.of(trees)
    paths = np.array([[0, 1], [2, 3]], np.int32)
    counts = tally(forest, paths)
    assert counts.lengths.tolist() == [0, 0, 2] and counts.moved == 2
    assert counts.verified.sum() == 6 and counts.accepted.sum() == 4
    assert tally(forest, np.array([[0, -1], [-1, -1]], np.int32)).moved == 0
