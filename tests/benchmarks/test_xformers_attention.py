"""Attention with xformers is exact; its functions are substituted, as its documentation says."""

import sys
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.gpu import xformers_attention
from lookahead_vllm.draft.tree import DraftTree
from tests.support.attention_cases import PagedAttentionCase, random_tree


@dataclass
class PagedBlockDiagonalPaddedKeysMask:
    q_seqlen: list[int]
    kv_seqlen: list[int]
    block_tables: torch.Tensor
    page_size: int

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device=None):
        return cls(q_seqlen, kv_seqlen, block_tables, page_size)


def attend(q, k, v, bias, scale):
    """q [M, G, H, K], k and v [N, G, H, K], bias [G, H, M, N] or 0."""
    scores = torch.einsum("mghd,nghd->ghmn", q, k) * scale + bias
    lse = scores.logsumexp(-1)
    return torch.einsum("ghmn,nghd->mghd", (scores - lse[..., None]).exp(), v), lse


def memory_efficient_attention_partial(query, key, value, attn_bias, scale):
    """Returns outputs of the query's shape and log-sum-exps [B, G, H, M]."""
    assert query.shape[2:] == key.shape[2:] == value.shape[2:]
    if isinstance(attn_bias, torch.Tensor):
        batch, rows, *groups = query.shape[:4]
        assert attn_bias.shape == (batch, *groups, rows, key.shape[1])
        results = [
            attend(q, k, v, b, scale)
            for q, k, v, b in zip(query, key, value, attn_bias, strict=True)
        ]
        return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])
    outs, lses, start = [], [], 0
    for i, (size, length) in enumerate(zip(attn_bias.q_seqlen, attn_bias.kv_seqlen, strict=True)):
        slots = torch.arange(length)
        pages = attn_bias.block_tables[i, slots // attn_bias.page_size].long()
        rows = pages * attn_bias.page_size + slots % attn_bias.page_size
        out, lse = attend(query[0, start : start + size], key[0, rows], value[0, rows], 0, scale)
        outs.append(out)
        lses.append(lse)
        start += size
    return torch.cat(outs)[None], torch.cat(lses, dim=-1)[None]


def merge_attentions(attn_split, lse_split, write_lse=True, output_dtype=None):
    weights = torch.stack(lse_split).softmax(0).permute(0, 1, 4, 2, 3)[..., None]
    return (torch.stack(attn_split) * weights).sum(0).to(output_dtype), None


@pytest.fixture
def fake_xformers(monkeypatch):
    modules = {
        name: ModuleType(name)
        for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    }
    fmha = modules["xformers.ops.fmha"]
    fmha.memory_efficient_attention_partial = memory_efficient_attention_partial
    fmha.merge_attentions = merge_attentions
    modules["xformers.ops"].fmha = fmha
    masks = modules["xformers.ops.fmha.attn_bias"]
    masks.PagedBlockDiagonalPaddedKeysMask = PagedBlockDiagonalPaddedKeysMask
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def case(**options):
    trees = [random_tree(np.random.default_rng(i), n) for i, n in enumerate((40, 3, 9))]
    trees.append(DraftTree.chain(range(11)))
    return PagedAttentionCase(trees, [50, 0, 17, 33], head_size=64, causal=(3,), **options)


@pytest.mark.parametrize("heads", [2, 6])
def test_context_and_draft_block_are_merged(fake_xformers, heads):
    # Whole pages are read, with weight 0 for unused slots, so these must not hold NaN.
    case(heads=heads, poison=0.0).check(xformers_attention.attend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5}, "no kernel for sliding_window"),
        ({"alibi": True, "soft_cap": 2.0}, "no kernel for alibi_slopes and logits_soft_cap"),
        ({"sinks": True}, "no kernel for sinks"),
        ({"fp8": True}, "no kernel for fp8 caches"),
        ({"layout": "heads first"}, "contiguous pages with tokens before heads"),
        ({"layout": "halves"}, "contiguous pages with tokens before heads"),
    ],
    ids=str,
)
def test_options_and_layouts_without_a_kernel_are_refused(fake_xformers, options, message):
    with pytest.raises(ValueError, match=message):
        case(**options).run(xformers_attention.attend)
