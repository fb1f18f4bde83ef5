"""The likeliest tokens are those of a full sort."""

import pytest
import torch

from lookahead_vllm.verify.choices import likeliest


@pytest.mark.parametrize("vocab", [8, 127, 128, 1025, 1280, 49_152, 50_257])
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_largest_and_their_gaps(vocab, k, dtype):
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab).to(dtype)
    logits[0, vocab // 2 :] = -torch.inf  # a grammar forbids them
    choices = likeliest(logits, k)
    best = logits.float().sort(dim=-1, descending=True)
    assert choices.tokens.shape == choices.gaps.shape == (5, k)
    found = logits.float().gather(1, torch.from_numpy(choices.tokens).long())
    assert torch.equal(found, best.values[:, :k])
    if k > 1:
        finite = found.isfinite()
        gaps = torch.from_numpy(choices.gaps)
        assert torch.equal(gaps[finite], (best.values[:, :1] - found)[finite])
    assert all(len(set(row)) == k for row in choices.tokens.tolist())


def test_no_rows_no_choices():
    assert likeliest(torch.empty(0, 49_152), 8).tokens.shape == (0, 8)
