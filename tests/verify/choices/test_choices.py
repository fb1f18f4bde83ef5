"""The top choices are the first tokens of a full sort."""

import numpy as np
import pytest
import torch

from lookahead_vllm.verify import native
from lookahead_vllm.verify.choices import reference, top_choices

IMPLS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(
    not native.available(), reason="no C++ compiler"))]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab", [8, 127, 128, 1025, 50_257])
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_and_gaps_are_those_of_a_sort(vocab, k, dtype, impl):
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab + 3).to(dtype)[:, :vocab]  # rows with a stride
    logits[0, vocab // 2 :] = -torch.inf  # as after a grammar's mask
    logits[1] = -torch.rand(vocab).to(dtype)
    rows = np.array([0, 1, 3, 6, 2, 2, 4, 5, 6, 0], np.int64)
    found = top_choices(logits, rows, k, impl)
    logits = logits[rows]
    best = logits.float().sort(dim=-1, descending=True)
    assert found.tokens.shape == found.gaps.shape == (len(rows), k)
    values = logits.float().gather(1, torch.from_numpy(found.tokens).long())
    assert torch.equal(values, best.values[:, :k])
    finite = values.isfinite()
    gaps = torch.from_numpy(found.gaps)
    assert torch.equal(gaps[finite], (best.values[:, :1] - values)[finite])
    assert all(len(set(row)) == k for row in found.tokens.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("piece_rows", "largest"), [(0, 1), (1, 1), (3, 3), (3.5, 3), (99, 10)])
def test_logits_are_copied_in_pieces(piece_rows, largest, dtype, monkeypatch):
    vocab = 200
    torch.manual_seed(0)
    logits = torch.stack([torch.randperm(vocab) for _ in range(7)]).to(dtype)
    rows = np.array([0, 1, 3, 6, 2, 2, 4, 5, 6, 0], np.int64)
    whole = top_choices(logits, rows, 4, impl="reference")
    copied, topk = [], torch.Tensor.topk

    def watched(self, *args):
        copied.append(tuple(self.shape))
        return topk(self, *args)

    monkeypatch.setattr(torch.Tensor, "topk", watched)
    limit = int(piece_rows * vocab * logits.element_size())
    monkeypatch.setattr(reference, "MAX_PIECE_BYTES", limit)
    pieces = top_choices(logits, rows, 4, impl="reference")
    assert np.array_equal(pieces.tokens, whole.tokens)
    assert np.array_equal(pieces.gaps, whole.gaps)
    assert max(copied) == (largest, vocab) and sum(n for n, _ in copied) == len(rows)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_give_no_choices(impl):
    no_rows = np.empty(0, np.int64)
    assert top_choices(torch.empty(3, 49_152), no_rows, 8, impl).tokens.shape == (0, 8)
