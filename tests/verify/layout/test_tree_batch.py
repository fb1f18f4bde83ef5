"""The masks, depths and bounds of a TreeBatch are those of its trees."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.verify.layout.tree_batch import TreeBatch


@st.composite
def trees(draw, max_nodes=80):
    n = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    return DraftTree.from_lists(range(n), parents)


def ancestors_and_self(tree: DraftTree, row: int) -> set[int]:
    rows = {row}
    while row:
        row = int(tree.parents[row - 1]) + 1
        rows.add(row)
    return rows


def attended(mask: torch.Tensor) -> set[int]:
    words = mask.numpy().view(np.uint32).tolist()
    return {32 * w + b for w, word in enumerate(words) for b in range(32) if word >> b & 1}


@settings(deadline=None, max_examples=40)  # the first example compiles
@given(st.lists(trees(), max_size=4))
def test_a_row_attends_to_its_ancestors_and_itself(forest):
    t = len(forest)
    batch = TreeBatch.build(forest, range(t), range(0, 100 * t, 100), [7] * t)
    assert len(batch) == t
    assert batch.sizes.tolist() == [len(tree) + 1 for tree in forest]
    assert batch.masks.shape[1] == (max(batch.sizes.tolist(), default=1) + 31) // 32
    row = 0
    for tree in forest:
        for j in range(len(tree) + 1):
            expected = ancestors_and_self(tree, j)
            assert attended(batch.masks[row]) == expected
            assert batch.depths[row] == len(expected) - 1
            row += 1
    assert row == len(batch.depths) == len(batch.masks)


def test_ends_bound_rows_tokens_and_slots():
    batch = TreeBatch.build([EMPTY_TREE, DraftTree.chain([1, 2])], [4, 2], [9, 5], [3, 30])
    assert batch.ends == (5, 10, 33)
    assert TreeBatch.build([], [], [], []).ends == (0, 0, 0)
