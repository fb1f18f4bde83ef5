"""Attention over a paged GPU cache is exact for trees, chains and prompts in one launch."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.attention import PagedCall, paged_attention
from lookahead_vllm.verify.layout.fixed_batch import FixedBatch
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from tests.support import torch_pages
from tests.support.attention_cases import IMPLS, PagedAttentionCase, random_tree
from tests.verify.conftest import IS_INTERPRETED

LAYOUTS = ("tokens first", "heads first", "halves")


@st.composite
def cases(draw: st.DrawFn) -> PagedAttentionCase:
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    count = draw(st.integers(1, 3))
    sizes = st.one_of(st.integers(0, 12), st.integers(30, 70))
    contexts = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65]), st.integers(0, 200))
    trees = [random_tree(rng, draw(sizes)) for _ in range(count)]
    causal = tuple(i for i in range(count) if draw(st.sampled_from([False, False, True])))
    for i in causal:
        trees[i] = DraftTree.chain(range(len(trees[i])))
    kv_heads = draw(st.sampled_from([1, 2]))
    return PagedAttentionCase(
        trees=trees,
        contexts=[draw(contexts) for _ in range(count)],
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5])),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([64, 80, 128])),
        block_size=draw(st.sampled_from([16, 32, 48, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        window=draw(st.sampled_from([-1, -1, 1, 5, 40, 100])),
        alibi=draw(st.booleans()),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        poison=draw(st.sampled_from([math.nan, math.inf])),
        gap=draw(st.integers(0, 2)),
        fused=draw(st.booleans()),
        seed=seed,
        layout=draw(st.sampled_from(LAYOUTS)),
        causal=causal,
    )


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=8 if IS_INTERPRETED else 60, deadline=None)  # the interpreter is slow
@given(case=cases())
def test_it_equals_float64_and_writes_no_other_row(impl, case):
    case.check(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_of_trees_a_prompt_a_decode_and_an_empty_draft(impl):
    """With all options; the first tree has several tiles, and masks of several words."""
    trees = [
        random_tree(np.random.default_rng(1), 70),
        DraftTree.from_lists(range(31), [-1] * 31),
        DraftTree.chain(range(40)),
        *[DraftTree.chain([])] * 2,
    ]
    options = dict(window=50, alibi=True, soft_cap=5.0, sinks=True, layout="halves")
    PagedAttentionCase(trees, [70, 1, 40, 65, 5], head_size=64, causal=(2, 3), **options).check(
        impl
    )


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("context", "head_size", "dtype"),
    [(0, 72, torch.float32), (31, 256, torch.float16), (32, 96, torch.float32)],
)
def test_heads_and_ends_of_contexts_that_fill_no_block(context, head_size, dtype):
    tree = random_tree(np.random.default_rng(head_size), 6)
    case = PagedAttentionCase([tree], [context], block_size=32, head_size=head_size, dtype=dtype)
    case.check("triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_an_fp8_cache(impl):
    trees = [random_tree(np.random.default_rng(5), 12), DraftTree.chain(range(20))]
    case = PagedAttentionCase(
        trees, [50, 17], head_size=64, fp8=True, layout="heads first", causal=(1,), poison=math.nan
    )
    case.check(impl)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("num_splits", "options"),
    [(1, {}), (2, {"window": 100}), (3, {"sinks": True, "soft_cap": 5.0}), (7, {"fp8": True})],
)
def test_splits_of_the_context_give_the_same(num_splits, options):
    from lookahead_vllm.verify.attention.triton import attend

    trees = [random_tree(np.random.default_rng(2), 9), DraftTree.chain([1, 2]), DraftTree.chain([])]
    case = PagedAttentionCase(trees, [600, 3, 0], head_size=64, causal=(1,), **options)
    case.check(partial(attend, num_splits=num_splits))


def attend_contexts(call: PagedCall) -> torch.Tensor:
    """Write the attention of all rows to their contexts alone, and return its sums' logarithms."""
    batch, cache = call.batch, torch.cat((call.key_cache, call.value_cache), -1).transpose(1, 2)
    starts = torch.cat((batch.starts, batch.starts[-1:] + batch.sizes[-1:]))
    table, output = call.block_table[batch.requests.long()], call.output.view_as(call.query)
    return torch_pages.attend(
        call.query, cache, starts, batch.contexts, table, call.scale, False, output, call.soft_cap
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("holds_all", [False, True])
def test_draft_blocks_are_merged_with_contexts_of_others(impl, soft_cap, holds_all, monkeypatch):
    size = "lookahead_vllm.verify.attention.triton._INTERPRETED_MULTIPROCESSORS"
    monkeypatch.setattr(size, 1 if holds_all else 99)  # with one, a program takes several tiles
    rng = np.random.default_rng(3)
    trees = [random_tree(rng, 12), random_tree(rng, 70), DraftTree.chain([]), DraftTree.chain([0])]
    case = PagedAttentionCase(
        trees,
        [70, 1, 40, 0],
        heads=4,
        kv_heads=2,
        head_size=64,
        causal=(2, 3),
        soft_cap=soft_cap,
        gap=0,
    )

    def attend(call: PagedCall) -> None:
        if holds_all:
            requests = range(4)
            starts = np.cumsum([0, *(1 + len(tree) for tree in trees)]).astype(np.int32)
            contexts = torch.tensor(case.contexts, dtype=torch.int32)
            fixed = FixedBatch(96, 4, 71, 99, "cpu", contexts)
            branching = TreeBatch.build(trees[:2], requests[:2], starts[:2], case.contexts[:2])
            fixed.fill(branching, starts)
            table = call.block_table[case.batch.requests.long()]
            call = call._replace(batch=fixed.batch, block_table=table)
        lse = attend_contexts(call)
        paged_attention(call._replace(context_lse=lse), impl)

    case.check(attend)
