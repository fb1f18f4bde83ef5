"""The top choices are the first tokens of a full sort."""

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
    found = Choices.on_host(pack_choices(logits, k))
    best = logits.float().sort(dim=-1, descending=True)
    assert found.tokens.shape == found.gaps.shape == (7, k)
    values = logits.float().gather(1, torch.from_numpy(found.tokens).long())
    assert torch.equal(values, best.values[:, :k])
    finite = values.isfinite()
    gaps = torch.from_numpy(found.gaps)
    assert torch.equal(gaps[finite], (best.values[:, :1] - values)[finite])
    assert all(len(set(row)) == k for row in found.tokens.tolist())


def test_no_rows_give_no_choices():
    assert Choices.on_host(pack_choices(torch.empty(0, 49_152), 8)).tokens.shape == (0, 8)
