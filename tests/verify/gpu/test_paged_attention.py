"""Attention over a paged GPU cache is exact for trees, chains and prompts in one launch.

The Triton kernels run under Triton's interpreter. It must be selected before the import of triton,
so `test_triton_under_its_interpreter` runs this folder's Triton tests in another process.
"""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.gpu.paged_attention import paged_attention
from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
from lookahead_vllm.verify.tree_batch import TreeBatch
from tests.support.attention_cases import PagedAttentionCase, random_tree

HAS_TRITON = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = [
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="runs in another process")
    ),
]
LAYOUTS = ("tokens first", "heads first", "halves")


@st.composite
def cases(draw):
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
@settings(max_examples=25 if HAS_TRITON else 60, deadline=None)  # the interpreter is slow
@given(case=cases())
def test_it_equals_float64_and_writes_no_other_row(impl, case):
    case.check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 112, 128, 192, 256])
def test_every_head_size(impl, dtype, head_size):
    tree = random_tree(np.random.default_rng(head_size), 6)
    PagedAttentionCase([tree], [33], head_size=head_size, dtype=dtype).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("context", [0, 1, 15, 16, 31, 32, 33, 64, 100])
def test_every_position_of_the_end_in_a_page(impl, context):
    tree = random_tree(np.random.default_rng(context), 20)
    PagedAttentionCase([tree], [context], block_size=32, head_size=64).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_of_trees_a_prompt_a_decode_and_an_empty_draft(impl):
    star = DraftTree.from_lists(range(31), [-1] * 31)
    trees = [
        random_tree(np.random.default_rng(1), 128),
        star,
        DraftTree.chain(range(90)),
        *[DraftTree.chain([])] * 2,
    ]
    case = PagedAttentionCase(trees, [70, 1, 40, 65, 5], heads=6, head_size=64, causal=(2, 3))
    case.check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_fp8_cache(impl, layout):
    trees = [random_tree(np.random.default_rng(5), 12), DraftTree.chain(range(20))]
    case = PagedAttentionCase(
        trees, [50, 17], head_size=64, fp8=True, layout=layout, causal=(1,), poison=math.nan
    )
    case.check(impl)


@pytest.mark.skipif(not HAS_TRITON, reason="runs in another process")
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"sinks": True, "soft_cap": 5.0}, {"fp8": True}], ids=str
)
def test_splits_of_the_context_give_the_same_with_triton(num_splits, options):
    from lookahead_vllm.verify.gpu.triton_attention import attend

    trees = [random_tree(np.random.default_rng(2), 9), DraftTree.chain([1, 2]), DraftTree.chain([])]
    case = PagedAttentionCase(trees, [600, 3, 0], head_size=64, causal=(1,), **options)
    case.check(partial(attend, num_splits=num_splits))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row, bit", [(1, 2), (3, 2), (2, 1)])
def test_one_wrong_mask_bit_changes_its_row_only(impl, row, bit):
    """So the tests above would fail with a wrong mask."""
    case = PagedAttentionCase(
        [DraftTree.from_lists([1, 2, 3], [-1, 0, -1])], [5], head_size=64, gap=0
    )
    right = case.run(impl).clone()
    case.paged_batch.masks[row, 0] ^= 1 << bit
    wrong = case.run(impl)
    others = [r for r in range(4) if r != row]
    assert torch.equal(right[others], wrong[others])
    assert not torch.allclose(right[row], wrong[row], atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "cuda"}, "choose 'auto', 'torch' or 'triton'"),
        ({"query": torch.zeros(4, 4, 64, dtype=torch.float64)}, "float32, bfloat16 or float16"),
        ({"query": torch.zeros(4, 3, 64)}, "3 query heads do not divide among 2 KV heads"),
        ({"key_cache": torch.zeros(3, 16, 2, 64).half()}, "they hold the query's"),
        ({"k_scale": torch.ones(1)}, "are given with an fp8 cache"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int64)}, "is int32, not torch.int64"),
        ({"sliding_window": 0}, "use -1 for none"),
        ({"output": torch.zeros(4, 4, 32)}, "output is"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_wrong_arguments_are_refused(change, message):
    caches = torch.zeros(3, 16, 2, 64)
    arguments = {
        **{"query": torch.zeros(4, 4, 64), "key_cache": caches, "value_cache": caches},
        **{"output": torch.zeros(4, 4, 64), "scale": 1.0},
        "block_table": torch.zeros(1, 3, dtype=torch.int32),
        "batch": PagedBatch.build(TreeBatch.build([DraftTree.chain([1])], [0], [0], [5])),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments, **change})


@pytest.mark.skipif(HAS_TRITON, reason="this is that process")
def test_triton_under_its_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton", str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
