"""The walk takes what the target model chose, and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree
from lookahead_vllm.verify.acceptance import accepted_paths


def accepted_path(tree: DraftTree, choices: list[int]) -> list[int]:
    """The path in this tree, which stands between two others."""
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
        else:  # keep indices dense
            parents.append(parent)
            tokens.append(100 + i)
    choices = draw(st.lists(st.integers(0, 4), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    return DraftTree.from_lists(tokens, parents), choices


@settings(deadline=None)  # the first example compiles
@given(trees_with_choices())
def test_the_path_follows_the_choices_as_far_as_the_tree_goes(case) -> None:
    tree, choices = case
    path = accepted_path(tree, choices)
    here, wanted = -1, choices[0]
    for node in path:
        assert tree.parents[node] == here
        assert tree.tokens[node] == wanted
        here, wanted = node, choices[node + 1]
    children = [int(tree.tokens[i]) for i in range(len(tree)) if tree.parents[i] == here]
    assert wanted not in children


def test_no_draft_emits_the_root_alone() -> None:
    assert accepted_path(EMPTY_TREE, [7]) == []


def test_a_full_match_keeps_its_bonus_token() -> None:
    assert accepted_path(DraftTree.chain([5, 6]), [5, 6, 9]) == [0, 1]


def test_a_later_sibling_can_win() -> None:
    tree = DraftTree.from_lists([1, 2, 3, 4], [-1, -1, 1, 0])
    assert accepted_path(tree, [2, 0, 3, 8, 8]) == [1, 2]
