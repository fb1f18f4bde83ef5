"""The bounds of a TreeBatch; its masks and depths are checked by the attention to its trees."""

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.verify.layout.tree_batch import TreeBatch


def test_the_shape_of_masks_and_the_ends_of_rows_tokens_and_slots():
    batch = TreeBatch.build([EMPTY_TREE, DraftTree.chain([1, 2])], [4, 2], [9, 5], [3, 30])
    assert batch.ends == (5, 10, 33)
    assert batch.masks.shape == (4, 1)
    assert TreeBatch.build([], [], [], []).ends == (0, 0, 0)
