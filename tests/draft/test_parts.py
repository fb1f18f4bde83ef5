"""Parts of a forest: complete, closed under parents, and about equally large."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.parts import cut_into_parts
from lookahead_vllm.draft.tree import DraftForest, DraftTree


@st.composite
def forests(draw: st.DrawFn, max_trees: int = 4, max_nodes: int = 12) -> DraftForest:
    trees = []
    for _ in range(draw(st.integers(0, max_trees))):
        parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, max_nodes)))]
        trees.append(DraftTree.from_lists(range(len(parents)), parents))
    return DraftForest.of(trees)


def ancestors(forest: DraftForest, node: int) -> set[int]:
    """The node and its ancestors, as nodes of the forest."""
    first, place, found = int(forest.firsts[forest.owners[node]]), int(forest.places[node]), set()
    while place >= 0:
        found.add(first + place)
        place = int(forest.parents[first + place])
    return found


@settings(deadline=None)
@given(forests(), st.integers(1, 5), st.data())
def test_every_node_is_in_its_owners_part_with_its_ancestors(forest, num_parts, data):
    is_whole = np.array([data.draw(st.booleans()) for _ in forest], np.bool_)
    parts = cut_into_parts(forest, num_parts, is_whole)
    expected = [set[int]() for _ in range(num_parts)]
    for node in range(forest.num_nodes):
        owner = int(parts.owners[node])
        if is_whole[forest.owners[node]]:
            assert owner == 0
            for part in expected:
                part.add(node)
        expected[owner] |= ancestors(forest, node)
    assert [set(np.flatnonzero(part).tolist()) for part in parts.contains] == expected


def smallest_largest_part(forest: DraftForest, num_parts: int) -> int:
    """The size of the largest part, the smallest that any assignment of leaves to parts gives."""
    is_leaf = np.ones(forest.num_nodes, np.bool_)
    inner = np.flatnonzero(forest.parents >= 0)
    is_leaf[forest.firsts[forest.owners[inner]] + forest.parents[inner]] = False
    branches = [ancestors(forest, leaf) for leaf in np.flatnonzero(is_leaf).tolist()]
    sizes = []
    for owners in itertools.product(range(num_parts), repeat=len(branches)):
        parts = [set[int]() for _ in range(num_parts)]
        for branch, owner in zip(branches, owners, strict=True):
            parts[owner] |= branch
        sizes.append(max(map(len, parts)))
    return min(sizes)


@settings(deadline=None, max_examples=60)
@given(forests(max_trees=2, max_nodes=7), st.integers(1, 3))
def test_the_largest_part_is_about_as_small_as_possible(forest, num_parts):
    """A cut through a tree shares at most one branch."""
    parts = cut_into_parts(forest, num_parts, np.zeros(len(forest), np.bool_))
    largest = int(parts.contains.sum(axis=1).max())
    shared = int(forest.depths.max(initial=1)) - 1
    best = smallest_largest_part(forest, num_parts)
    assert best <= largest <= best + shared


def test_branches_that_share_only_the_root_are_divided_evenly():
    chains = DraftTree.from_lists(range(12), [-1, 0, 1, -1, 3, 4, -1, 6, 7, -1, 9, 10])
    parts = cut_into_parts(DraftForest.of([chains]), 4, np.zeros(1, np.bool_))
    assert parts.contains.sum(axis=1).tolist() == [3, 3, 3, 3]
    assert parts.owners.tolist() == sorted([0, 1, 2, 3] * 3)
