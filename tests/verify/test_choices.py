"""The top choices are the first tokens of a full sort."""

import numpy as np
import pytest
import torch

from lookahead_vllm.verify.choices import Choices, pack_choices


@pytest.mark.parametrize("vocab", [8, 127, 128, 1025, 50_257])
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_and_gaps_are_those_of_a_sort(vocab, k, dtype):
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab + 3).to(dtype)[:, :vocab]  # rows with a stride
    logits[0, vocab // 2 :] = -torch.inf  # as after a grammar's mask
    logits[1] = -torch.rand(vocab).to(dtype)
    rows = np.array([0, 1, 3, 6, 2, 2, 4, 5, 6, 0], np.int64)
    found = Choices.at(rows, pack_choices(logits, k))
    logits = logits[rows]
    best = logits.float().sort(dim=-1, descending=True)
    assert found.tokens.shape == found.gaps.shape == (len(rows), k)
    values = logits.float().gather(1, torch.from_numpy(found.tokens).long())
    assert torch.equal(values, best.values[:, :k])
    finite = values.isfinite()
    gaps = torch.from_numpy(found.gaps)
    assert torch.equal(gaps[finite], (best.values[:, :1] - values)[finite])
    assert all(len(set(row)) == k for row in found.tokens.tolist())


def test_no_rows_give_no_choices():
    no_rows = np.empty(0, np.int64)
    packed = pack_choices(torch.empty(3, 49_152), 8)
    assert Choices.at(no_rows, packed).tokens.shape == (0, 8)
