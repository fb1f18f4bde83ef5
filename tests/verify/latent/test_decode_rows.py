"""Rows of trees as decode rows of their own: each attends to its context, ancestors and itself."""

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.latent.decode_rows import decode_rows
from tests.support.attention_cases import random_tree
from tests.support.latent_cases import LatentCase


@pytest.mark.parametrize("contexts", [[0, 15, 16], [31, 70, 1]])
def test_a_decode_row_has_the_context_and_path_of_its_node(contexts):
    rng = np.random.default_rng(1)
    case = LatentCase([random_tree(rng, n) for n in (5, 40, 0)], contexts)
    rows = decode_rows(case.batch, case.block_table, block_size=16)
    copied = case.cache[rows.slots // 16, rows.slots % 16].view(-1, 16, case.cache.shape[-1])
    assert not copied.isnan().any()
    for row, (query, length) in enumerate(zip(case.query, rows.lengths.tolist(), strict=True)):
        seen = copied[rows.block_table[row].long()].flatten(0, 1)[:length].double()
        weights = (query.double() @ seen.T * case.scale).softmax(-1)
        case.output[row] = weights @ seen[:, : case.rank]
    torch.testing.assert_close(case.output.double(), case.reference(), rtol=1e-5, atol=1e-6)


def test_rows_share_the_full_blocks_of_their_context():
    tree = DraftTree.from_lists([1, 2, 3], [-1, -1, 0])
    case = LatentCase([tree], [40])
    rows = decode_rows(case.batch, case.block_table, block_size=16)
    assert rows.block_table.tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]
    assert rows.lengths.tolist() == [41, 42, 42, 43]
