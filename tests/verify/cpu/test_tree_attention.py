"""Tree attention is exact attention: each row over the context, its ancestors and itself."""

import functools
import math
import platform
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
from lookahead_vllm.kernel_folder import cache_dir
from lookahead_vllm.verify.cpu import native
from lookahead_vllm.verify.cpu.tree_attention import supported, tree_attention
from lookahead_vllm.verify.tree_batch import TreeBatch
from tests.support.packing import pack

IMPLS = ["torch", pytest.param("native", marks=pytest.mark.skipif(
    not native.available(), reason="no C++ compiler"))]  # fmt: skip
ROUNDING = {torch.float32: 2**-18, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass
class Scene:
    """Trees, their keys and values, and a cache in which every other slot is poison."""

    trees: list[DraftTree]
    contexts: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = -1
    alibi: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    poison: float = math.nan
    gap: int = 1  # query tokens of other requests before each tree
    fused: bool = False
    packed: bool = False  # as vLLM does for AMX; with bfloat16 alone
    sick_node: bool = False  # the last node of each tree has a NaN key and inf values
    seed: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        sizes = [len(tree) + 1 for tree in self.trees]
        starts = [self.gap * (i + 1) + sum(sizes[:i]) for i in range(len(sizes))]
        tokens = sum(sizes) + self.gap * (len(sizes) + 1)
        rows = torch.randperm(len(sizes) + 2)[: len(sizes)].tolist()
        self.batch = TreeBatch.build(self.trees, rows, starts, self.contexts)

        width = (self.heads + 2 * self.kv_heads) * self.head_size
        qkv = torch.randn(tokens, width).to(self.dtype)
        query = qkv[:, : self.heads * self.head_size]
        self.query = query.view(tokens, self.heads, self.head_size)
        shape = (tokens, self.heads * self.head_size)
        self.output = torch.full(shape, math.nan, dtype=self.dtype)
        if not self.fused:
            self.query = self.query.contiguous()
            self.output = self.output.view_as(self.query)

        max_blocks = max(c + n for c, n in zip(self.contexts, sizes, strict=True))
        max_blocks = max_blocks // self.block_size + 2
        blocks = (len(sizes) + 2) * max_blocks
        self.block_table = torch.randperm(blocks).int().view(-1, max_blocks)
        shape = (blocks, 2, self.kv_heads, self.block_size, 2 * self.head_size)
        whole = torch.full(shape, self.poison, dtype=self.dtype)
        self.kv_cache = whole[:, 0] if self.fused else whole[:, 0].contiguous()
        flat = self.kv_cache.flatten(2)
        cut = self.block_size * self.head_size
        k_cache = flat[..., :cut].unflatten(-1, (self.head_size, self.block_size))
        v_cache = flat[..., cut:].unflatten(-1, (self.block_size, self.head_size))
        for row, size, context in zip(rows, sizes, self.contexts, strict=True):
            n = context + size
            k = torch.randn(n, self.kv_heads, self.head_size).to(self.dtype)
            v = torch.randn(n, self.kv_heads, self.head_size).to(self.dtype)
            if self.sick_node and size > 1:
                k[-1], v[-1] = math.nan, math.inf
            slots = torch.arange(n)
            if self.window > 0:  # what left the root's window may have been freed
                slots = slots[max(0, context - self.window + 1) :]
            blocks_of = self.block_table[row, slots // self.block_size].long()
            k_cache[blocks_of, :, :, slots % self.block_size] = k[slots]
            v_cache[blocks_of, :, slots % self.block_size] = v[slots]
            self.keys.append(k)
            self.values.append(v)
        self.packed = self.packed and self.dtype == torch.bfloat16
        if self.packed:
            pack(self.kv_cache)

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def alibi_slopes(self) -> torch.Tensor | None:
        return 2.0 ** -torch.arange(1, self.heads + 1).float() if self.alibi else None

    @property
    def sink_logits(self) -> torch.Tensor | None:
        return torch.linspace(-1, 2, self.heads).to(self.dtype) if self.sinks else None

    def run(self, impl: str, batch: TreeBatch | None = None) -> torch.Tensor:
        if self.packed and impl == "native" and not native.reads_packed():
            impl = "auto"
        tree_attention(
            self.query,
            self.kv_cache,
            self.output,
            self.block_table,
            self.batch if batch is None else batch,
            scale=self.scale,
            sliding_window=self.window,
            alibi_slopes=self.alibi_slopes,
            logits_soft_cap=self.soft_cap,
            sinks=self.sink_logits,
            packed=self.packed,
            impl=impl,
        )
        return self.output.view(len(self.query), self.heads, self.head_size)

    def reference(self) -> torch.Tensor:
        """Row by row, head by head, in float64; NaN where no tree's row is."""
        output = torch.full(self.query.shape, math.nan, dtype=torch.float64)
        group = self.heads // self.kv_heads
        for tree, k, v, start, context in zip(
            self.trees, self.keys, self.values, self.batch.starts, self.contexts, strict=True
        ):
            depth = [0, *tree.depths.tolist()]
            parent = [-1, *(tree.parents + 1).tolist()]
            for row in range(len(tree) + 1):
                slots = list(range(context))
                positions = list(range(context))
                node = row
                while node >= 0:
                    slots.append(context + node)
                    positions.append(context + depth[node])
                    node = parent[node]
                distance = torch.tensor(positions) - (context + depth[row])
                seen = distance > -self.window if self.window > 0 else distance <= 0
                slots, distance = torch.tensor(slots)[seen], distance[seen].double()
                for head in range(self.heads):
                    q = self.query[start + row, head].double()
                    scores = k[slots, head // group].double() @ q * self.scale
                    if self.soft_cap:
                        scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                    if self.alibi:
                        scores += self.alibi_slopes[head].double() * distance
                    if self.sinks:
                        scores = torch.cat((scores, self.sink_logits[head, None].double()))
                    p = scores.softmax(0)[: len(slots)]
                    output[start + row, head] = p @ v[slots, head // group].double()
        return output

    def check(self, impl: str, atol: float = 2e-5) -> None:
        expected, rtol = self.reference(), ROUNDING[self.dtype]
        result = self.run(impl).double()
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)


def draw_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    reach = int(rng.integers(1, nodes + 2))
    parents = [int(rng.integers(max(-1, i - reach), i)) for i in range(nodes)]
    return DraftTree.from_lists(range(nodes), parents)


@st.composite
def scenes(draw):
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    count = draw(st.integers(1, 3))
    sizes = st.one_of(st.integers(0, 12), st.integers(30, 70))
    contexts = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129]), st.integers(0, 300))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Scene(
        trees=[draw_tree(rng, draw(sizes)) for _ in range(count)],
        contexts=[draw(contexts) for _ in range(count)],
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5])),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([32, 48, 64, 80, 128])),
        block_size=draw(st.sampled_from([16, 32, 48, 64, 128])),
        dtype=draw(st.sampled_from(list(ROUNDING))),
        window=draw(st.sampled_from([-1, -1, 1, 2, 5, 40, 100])),
        alibi=draw(st.booleans()),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        poison=draw(st.sampled_from([math.nan, math.inf, -math.inf])),
        gap=draw(st.integers(0, 2)),
        fused=draw(st.booleans()),
        packed=draw(st.booleans()),
        sick_node=draw(st.sampled_from([False, False, True])),
        seed=seed,
    )


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=150, deadline=None)
@given(scene=scenes())
def test_equals_brute_force_and_touches_nothing_else(impl, scene):
    scene.check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("head_size", [32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512])
def test_every_head_size(impl, dtype, head_size):
    tree = draw_tree(np.random.default_rng(head_size), 6)
    for packed in {False, dtype == torch.bfloat16}:
        Scene([tree], [33], head_size=head_size, dtype=dtype, packed=packed).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_every_number_of_rows(impl, dtype):
    for nodes in range(30):
        tree = draw_tree(np.random.default_rng(nodes), nodes)
        for packed in {False, dtype == torch.bfloat16}:
            Scene([tree], [20], heads=1, kv_heads=1, dtype=dtype, packed=packed).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_tree_of_256_nodes_beside_an_empty_one(impl):
    trees = [draw_tree(np.random.default_rng(1), 256), DraftTree.chain([])]
    Scene(trees, [100, 5], heads=3, kv_heads=1).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("window", [-1, 70])
def test_a_split_of_the_context_between_threads_changes_nothing(impl, threads, window):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tree = draw_tree(np.random.default_rng(2), 9)
        Scene([tree, tree], [1500, 3], block_size=32, window=window, sinks=True).check(impl)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row, bit", [(1, 2), (3, 2), (2, 1)])
def test_one_wrong_mask_bit_shows(impl, row, bit):
    """The claims above would notice a wrong mask: one bit more or less moves its row alone."""
    scene = Scene([DraftTree.from_lists([1, 2, 3], [-1, 0, -1])], [5], gap=0)
    right = scene.run(impl).clone()
    scene.batch.masks[row, 0] ^= 1 << bit
    wrong = scene.run(impl)
    others = [r for r in range(4) if r != row]
    assert torch.equal(right[others], wrong[others])
    assert not torch.allclose(right[row], wrong[row], atol=1e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sick_node_harms_only_those_who_see_it(impl):
    parents = [-1, -1, 0, 1]
    scene = Scene([DraftTree.from_lists(range(4), parents)], [20], sick_node=True, gap=0)
    finite = scene.run(impl).isfinite().flatten(1).all(1)
    assert finite.tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_extreme_scores_stay_exact(impl, dtype):
    scene = Scene([draw_tree(np.random.default_rng(3), 8)], [90], dtype=dtype)
    scene.query *= 200
    scene.check(impl, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"window": 20}, {"window": 64}, {"alibi": True}, {"soft_cap": 3.0},
     {"sinks": True}, {"alibi": True, "soft_cap": 3.0, "window": 20, "sinks": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_chain_gives_what_vllm_gives(impl, dtype, options):
    ops = pytest.importorskip("vllm._custom_ops")
    trees = [DraftTree.chain(range(n)) for n in (7, 3, 12)]
    contexts = [70, 0, 150]
    # vLLM's kernel multiplies the values of unused slots by zero, so they must be numbers.
    scene = Scene(trees, contexts, block_size=32, dtype=dtype, gap=0, poison=0.0, **options)
    sizes = scene.batch.sizes
    starts = torch.cat((scene.batch.starts, sizes.sum()[None])).int()
    seq_lens = (sizes + scene.batch.contexts).int()
    scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        len(trees), scene.heads, scene.kv_heads, scene.head_size, seq_lens, dtype, starts,
        True, scene.window, "vec", True,
    )  # fmt: skip
    blocks, kv_heads, block_size, _ = scene.kv_cache.shape
    k, v = scene.kv_cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    expected = torch.empty_like(scene.query)
    sinks = scene.sink_logits
    ops.cpu_attention_with_kv_cache(
        scene.query, k, v, expected, starts, seq_lens, scene.scale, True, scene.alibi_slopes,
        scene.window, scene.block_table[scene.batch.rows.long()].contiguous(), scene.soft_cap,
        scheduler_metadata, sinks if dtype == torch.bfloat16 or sinks is None else sinks.float(),
    )  # fmt: skip
    torch.testing.assert_close(scene.run(impl), expected, rtol=2 * ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize(
    "isa, head_size", [("vec", 64), ("vec16", 80), ("vec16", 48), ("amx", 64), ("amx", 96)]
)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_the_cache_layout_is_what_vllm_writes(isa, head_size, dtype):
    ops = pytest.importorskip("vllm._custom_ops")
    packed = isa == "amx"
    if packed and (dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported()):
        pytest.skip("AMX, where there is one, is for bfloat16")
    scene = Scene(
        [DraftTree.chain([1, 2])],
        [40],
        head_size=head_size,
        block_size=32 if packed else 16,
        dtype=dtype,
        gap=0,
        packed=packed,
    )
    cache = torch.full_like(scene.kv_cache, scene.poison)
    blocks, kv_heads, block_size, _ = cache.shape
    k, v = cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    slots = torch.arange(43)
    table = scene.block_table[int(scene.batch.rows[0])].long()
    slots = table[slots // block_size] * block_size + slots % block_size
    ops.cpu_attn_reshape_and_cache(scene.keys[0], scene.values[0], k, v, slots, isa)
    assert torch.equal(cache.nan_to_num(), scene.kv_cache.nan_to_num())


@pytest.mark.parametrize("impl", IMPLS)
def test_no_trees_no_work(impl):
    scene = Scene([DraftTree.chain([1])], [4])
    assert scene.run(impl, TreeBatch.build([], [], [], [])).isnan().all()


def test_what_does_not_fit_is_refused():
    assert supported(64, torch.bfloat16, 128)
    assert not supported(16, torch.bfloat16, 128)
    assert not supported(64, torch.float64, 128)
    assert not supported(64, torch.float32, 24)
    assert supported(64, torch.bfloat16, 32, packed=True)
    assert not supported(64, torch.float16, 32, packed=True)
    scene = Scene([DraftTree.chain([1])], [4])

    def call(**changes):
        tensors = {
            name: changes.pop(name, getattr(scene, name))
            for name in ("query", "kv_cache", "output", "block_table", "batch")
        }
        tree_attention(**tensors, scale=1.0, **changes)

    far = TreeBatch.build([DraftTree.chain([1])], [0], [0], [10_000])
    for changes, message in [
        ({"output": scene.output.bfloat16()}, "share one dtype"),
        ({"query": scene.query[..., :24]}, "head size 24"),
        ({"query": scene.query[:, :3]}, "divide"),
        ({"kv_cache": scene.kv_cache[..., :32]}, "contiguous in its"),
        ({"block_table": scene.block_table.long()}, "int32"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"batch": far}, "slot 10001"),
        ({"impl": "cuda"}, "impl"),
        ({"packed": True}, "packed cache holds bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**changes)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A folder of its own for what is compiled."""
    monkeypatch.setenv("LOOKAHEAD_VLLM_CACHE", str(tmp_path))
    cache_dir.cache_clear()
    yield
    cache_dir.cache_clear()


@pytest.mark.usefixtures("empty_cache")
def test_a_damaged_build_is_made_again(monkeypatch):
    if not native.available():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(native, "_FLAGS", [f if f != "-O3" else "-O0" for f in native._FLAGS])
    compiler = native._compiler()
    path = cache_dir() / f"verify-{native._fingerprint(compiler)}.so"
    path.write_bytes(b"not a library")
    assert native.load.__wrapped__() is not None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("flag", ["-mno-avx512bf16", "-mno-avx512f", "-march=x86-64"])
def test_older_processors_get_it_right_too(flag, monkeypatch):
    if not native.available():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(native, "_FLAGS", [*native._FLAGS, flag])
    monkeypatch.setattr(native, "load", functools.cache(native.load.__wrapped__))
    trees = [draw_tree(np.random.default_rng(4), 17), DraftTree.chain(range(3))]
    options = {"window": 150, "alibi": True, "soft_cap": 30.0, "sinks": True, "sick_node": True}
    for dtype in ROUNDING:
        Scene(trees, [300, 5], head_size=80, block_size=48, dtype=dtype).check("native")
        Scene(trees, [300, 5], head_size=64, dtype=dtype, **options).check("native")


def test_without_a_compiler_torch_serves(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    assert not native.available()
    assert "compiler" in caplog.text
    Scene([DraftTree.from_lists([1, 2], [-1, -1])], [4]).check("auto")


COUNT_THREADS = """
import os, torch
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.cpu.tree_attention import tree_attention
from lookahead_vllm.verify.tree_batch import TreeBatch

torch.set_num_threads(3)
torch.ones(10**6).exp()
before = len(os.listdir("/proc/self/task"))
cache, table = torch.randn(9, 3, 128, 64), torch.arange(9).int()[None]
batch = TreeBatch.build([DraftTree.chain(range(7))], [0], [0], [1000])
query = torch.randn(8, 3, 32)
tree_attention(query, cache, query.clone(), table, batch, scale=1.0, impl="native")
assert before >= 3
assert len(os.listdir("/proc/self/task")) == before
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_the_kernel_runs_on_the_threads_of_torch():
    if not native.available():
        pytest.skip("no C++ compiler")
    subprocess.run([sys.executable, "-c", COUNT_THREADS], check=True)
