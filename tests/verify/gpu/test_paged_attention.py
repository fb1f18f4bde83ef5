"""Attention over a paged GPU cache is exact, too: trees, chains and prompts in one launch.

Triton's kernels run under its interpreter, which has to be chosen before triton is imported: in a
process of its own, which `test_triton_under_its_interpreter` starts.
"""

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.gpu.paged_attention import paged_attention
from lookahead_vllm.verify.gpu.paged_batch import PagedBatch, PagedCall
from lookahead_vllm.verify.tree_batch import TreeBatch
from tests.verify.cpu.test_tree_attention import Scene, draw_tree

HAS_TRITON = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = [
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="in a process of its own")
    ),
]
ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
LAYOUTS = ("tokens first", "heads first", "halves")


@dataclass
class PagedScene(Scene):
    """The same, in vLLM's layouts on CUDA; trees whose index is in `causal` are without masks."""

    layout: str = "tokens first"
    causal: tuple[int, ...] = ()
    fp8: bool = False
    num_splits: int | None = None
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        blocks = self.block_table.numel()
        size, heads, width = self.block_size, self.kv_heads, self.head_size
        dtype = torch.float8_e4m3fn if self.fp8 else self.dtype
        shape = {
            "tokens first": (blocks, size, heads, 2 * width),
            "heads first": (blocks, heads, size, 2 * width),
            "halves": (blocks, 2, size, heads, width),
        }[self.layout]
        whole = torch.full(shape, self.poison).to(dtype)
        if self.layout == "halves":
            self.key_cache, self.value_cache = whole.unbind(1)
        else:
            if self.layout == "heads first":
                whole = whole.transpose(1, 2)
            self.key_cache, self.value_cache = whole.split(width, dim=-1)
        self.whole = whole
        if self.fp8:
            self.scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.05])}
            for name, texts in (("k_scale", self.keys), ("v_scale", self.values)):
                for i, text in enumerate(texts):
                    texts[i] = (text / self.scales[name]).to(dtype).float() * self.scales[name]
        for row, k, v, context in zip(
            self.batch.rows, self.keys, self.values, self.contexts, strict=True
        ):
            oldest = max(0, context - self.window + 1) if self.window > 0 else 0
            slots = torch.arange(oldest, len(k))
            place = self.block_table[row, slots // size].long(), slots % size
            self.key_cache[place] = (k[slots] / self.scales.get("k_scale", 1.0)).to(dtype)
            self.value_cache[place] = (v[slots] / self.scales.get("v_scale", 1.0)).to(dtype)
        self.paged = self.paged_batch()

    def paged_batch(self) -> PagedBatch:
        trees = [i for i in range(len(self.trees)) if i not in self.causal]
        columns = [
            np.array([column[i] for i in some], np.int32)
            for some in (trees, self.causal)
            for column in (self.batch.rows, self.batch.starts, self.contexts)
        ]
        sizes = [len(self.trees[i]) + 1 for i in self.causal]
        return PagedBatch.build(
            TreeBatch.build([self.trees[i] for i in trees], *columns[:3]),
            others=(*columns[3:5], sizes, columns[5]),
        )

    def run(self, impl: str, batch: PagedBatch | None = None) -> torch.Tensor:
        arguments = {
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "output": self.output,
            "block_table": self.block_table,
            "batch": self.paged if batch is None else batch,
            "scale": self.scale,
            "sliding_window": self.window,
            "alibi_slopes": self.alibi_slopes,
            "logits_soft_cap": self.soft_cap,
            "sinks": self.sink_logits,
            "k_scale": self.scales.get("k_scale"),
            "v_scale": self.scales.get("v_scale"),
        }
        if self.num_splits is None:
            paged_attention(**arguments, impl=impl)
        else:
            from lookahead_vllm.verify.gpu.triton_attention import attend

            attend(PagedCall(**arguments), self.num_splits)
        return self.output.view(len(self.query), self.heads, self.head_size)

    def check(self, impl: str) -> None:
        expected, result = self.reference(), self.run(impl).double()
        rows = expected.isfinite().flatten(1).all(1)
        assert torch.equal(result.isfinite().flatten(1).all(1), rows)  # and nobody else's
        error = (result - expected)[rows].norm(dim=-1) / expected[rows].norm(dim=-1)
        assert error.max() < ERROR[self.dtype]


@st.composite
def scenes(draw):
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    count = draw(st.integers(1, 3))
    sizes = st.one_of(st.integers(0, 12), st.integers(30, 70))
    contexts = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65]), st.integers(0, 200))
    trees = [draw_tree(rng, draw(sizes)) for _ in range(count)]
    causal = tuple(i for i in range(count) if draw(st.sampled_from([False, False, True])))
    for i in causal:
        trees[i] = DraftTree.chain(range(len(trees[i])))
    kv_heads = draw(st.sampled_from([1, 2]))
    return PagedScene(
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
@settings(max_examples=60, deadline=None)
@given(scene=scenes())
def test_equals_brute_force_and_touches_nothing_else(impl, scene):
    scene.check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 112, 128, 192, 256])
def test_every_head_size(impl, dtype, head_size):
    tree = draw_tree(np.random.default_rng(head_size), 6)
    PagedScene([tree], [33], head_size=head_size, dtype=dtype).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("context", [0, 1, 15, 16, 31, 32, 33, 64, 100])
def test_every_end_of_a_page(impl, context):
    tree = draw_tree(np.random.default_rng(context), 20)
    PagedScene([tree], [context], block_size=32, head_size=64).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_full_tree_a_star_a_prompt_a_decode_and_an_empty_draft(impl):
    star = DraftTree.from_lists(range(31), [-1] * 31)
    trees = [
        draw_tree(np.random.default_rng(1), 128),
        star,
        DraftTree.chain(range(90)),
        *[DraftTree.chain([])] * 2,
    ]
    scene = PagedScene(trees, [70, 1, 40, 65, 5], heads=6, head_size=64, causal=(2, 3))
    scene.check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_fp8_cache(impl, layout):
    trees = [draw_tree(np.random.default_rng(5), 12), DraftTree.chain(range(20))]
    scene = PagedScene(
        trees, [50, 17], head_size=64, fp8=True, layout=layout, causal=(1,), poison=math.nan
    )
    scene.check(impl)


@pytest.mark.skipif(not HAS_TRITON, reason="in a process of its own")
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"sinks": True, "soft_cap": 5.0}, {"fp8": True}], ids=str
)
def test_a_split_of_the_context_changes_nothing_with_triton(num_splits, options):
    trees = [draw_tree(np.random.default_rng(2), 9), DraftTree.chain([1, 2]), DraftTree.chain([])]
    PagedScene(
        trees, [600, 3, 0], head_size=64, causal=(1,), num_splits=num_splits, **options
    ).check("triton")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row, bit", [(1, 2), (3, 2), (2, 1)])
def test_one_wrong_mask_bit_shows(impl, row, bit):
    """The claims above would notice a wrong mask: one bit more or less moves its row alone."""
    scene = PagedScene([DraftTree.from_lists([1, 2, 3], [-1, 0, -1])], [5], head_size=64, gap=0)
    right = scene.run(impl).clone()
    scene.paged.masks[row, 0] ^= 1 << bit
    wrong = scene.run(impl)
    others = [r for r in range(4) if r != row]
    assert torch.equal(right[others], wrong[others])
    assert not torch.allclose(right[row], wrong[row], atol=1e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_fixed_buffers_say_what_the_last_batch_said(impl):
    """As a CUDA graph needs it: the same tensors, with room for more, step after step."""
    large = PagedScene(
        [draw_tree(np.random.default_rng(i), 40) for i in range(3)], [90, 80, 70], head_size=64
    )
    buffers = large.paged
    for seed in range(2):
        tree = draw_tree(np.random.default_rng(seed), 7)
        scene = PagedScene([tree, DraftTree.chain([1])], [20, 9], head_size=64, causal=(1,))
        buffers.take_over(scene.paged)
        scene.paged = buffers
        scene.check(impl)
    with pytest.raises(ValueError, match=r"'requests': 5.* does not fit into buffers"):
        buffers.take_over(PagedScene([tree] * 5, [3] * 5).paged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "cuda"}, "choose one of auto, torch, triton, xformers"),
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
def test_what_does_not_fit_is_refused(change, message):
    caches = torch.zeros(3, 16, 2, 64)
    arguments = {
        **{"query": torch.zeros(4, 4, 64), "key_cache": caches, "value_cache": caches},
        **{"output": torch.zeros(4, 4, 64), "scale": 1.0},
        "block_table": torch.zeros(1, 3, dtype=torch.int32),
        "batch": PagedBatch.build(TreeBatch.build([DraftTree.chain([1])], [0], [0], [5])),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments, **change})


@pytest.mark.skipif(HAS_TRITON, reason="this is it")
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
