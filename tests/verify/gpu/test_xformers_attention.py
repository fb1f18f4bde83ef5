"""What is handed to xformers is right; its functions are stood in for, by their documentation."""

import sys
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftTree
from tests.verify.cpu.test_tree_attention import draw_tree
from tests.verify.gpu.test_paged_attention import PagedScene


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
    """Outputs shaped as the query, and log-sum-exps [B, G, H, M]."""
    assert query.shape[2:] == key.shape[2:] == value.shape[2:]
    if isinstance(attn_bias, torch.Tensor):
        batch, rows, *groups = query.shape[:4]
        assert attn_bias.shape == (batch, *groups, rows, key.shape[1])
        done = [
            attend(q, k, v, b, scale)
            for q, k, v, b in zip(query, key, value, attn_bias, strict=True)
        ]
        return torch.stack([out for out, _ in done]), torch.stack([lse for _, lse in done])
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
def stand_in(monkeypatch):
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


def scene(**options):
    trees = [draw_tree(np.random.default_rng(i), n) for i, n in enumerate((40, 3, 9))]
    trees.append(DraftTree.chain(range(11)))
    return PagedScene(trees, [50, 0, 17, 33], head_size=64, causal=(3,), **options)


@pytest.mark.parametrize("heads", [2, 6])
def test_prefix_and_draft_block_are_merged(stand_in, heads):
    # Slots that nobody has are multiplied by zero where a page is read whole, so no NaN.
    scene(heads=heads, poison=0.0).check("xformers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5}, "has no sliding_window; write impl='triton'"),
        ({"alibi": True, "soft_cap": 2.0}, "has no alibi_slopes and no logits_soft_cap"),
        ({"sinks": True}, "has no sinks"),
        ({"fp8": True}, "has no fp8 caches"),
        ({"layout": "heads first"}, "one after the other, tokens before heads"),
        ({"layout": "halves"}, "one after the other, tokens before heads"),
    ],
    ids=str,
)
def test_what_it_has_no_kernel_for_is_refused(stand_in, options, message):
    with pytest.raises(ValueError, match=message):
        scene(**options).run("xformers")


def test_it_has_to_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ValueError, match="pip install xformers, or write impl='triton'"):
        scene().run("xformers")
