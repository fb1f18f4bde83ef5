"""The likeliest tokens are those of a full sort."""

import numpy as np
import pytest
import torch

from lookahead_vllm.verify.choices import likeliest
from lookahead_vllm.verify.cpu import native

IMPLS = ["torch", pytest.param("native", marks=pytest.mark.skipif(
    not native.available(), reason="no C++ compiler"))]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab", [8, 127, 128, 1025, 1280, 49_152, 50_257])
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_the_largest_and_their_gaps(vocab, k, dtype, impl):
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab + 3).to(dtype)[:, :vocab]  # rows apart in memory
    logits[0, vocab // 2 :] = -torch.inf  # a grammar forbids them
    logits[1] = -torch.rand(vocab).to(dtype)
    rows = np.array([0, 1, 3, 6, 2, 2, 4, 5, 6, 0], np.int64)
    choices = likeliest(logits, rows, k, impl)
    logits = logits[rows]
    best = logits.float().sort(dim=-1, descending=True)
    assert choices.tokens.shape == choices.gaps.shape == (len(rows), k)
    found = logits.float().gather(1, torch.from_numpy(choices.tokens).long())
    assert torch.equal(found, best.values[:, :k])
    finite = found.isfinite()
    gaps = torch.from_numpy(choices.gaps)
    assert torch.equal(gaps[finite], (best.values[:, :1] - found)[finite])
    assert all(len(set(row)) == k for row in choices.tokens.tolist())


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_no_choices(impl):
    none = np.empty(0, np.int64)
    assert likeliest(torch.empty(3, 49_152), none, 8, impl).tokens.shape == (0, 8)


@pytest.mark.parametrize("k", [0, 9, 17])
def test_no_more_than_there_are(k):
    with pytest.raises(ValueError, match=f"k is {k}; there are 1 to 8 choices"):
        likeliest(torch.zeros(1, 8), np.zeros(1, np.int64), k)


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="'cuda'; choose 'auto', 'torch' or 'native'"):
        likeliest(torch.zeros(1, 8), np.zeros(1, np.int64), 1, impl="cuda")
