"""Tree attention is exact: each row attends to the context, its ancestors and itself."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify import native
from lookahead_vllm.verify.attention.cpu import supported
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from tests.support.attention_cases import ROUNDING, AttentionCase, random_tree


@st.composite
def cases(draw):
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    count = draw(st.integers(1, 3))
    sizes = st.one_of(st.integers(0, 12), st.integers(30, 70))
    contexts = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129]), st.integers(0, 300))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return AttentionCase(
        trees=[random_tree(rng, draw(sizes)) for _ in range(count)],
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
        nan_node=draw(st.sampled_from([False, False, True])),
        seed=seed,
    )


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_it_equals_float64_and_writes_no_other_row(case):
    case.check()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_every_head_size_and_every_number_of_rows(dtype):
    for packed in {False, dtype == torch.bfloat16}:
        options = {"dtype": dtype, "packed": packed}
        for head_size in (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512):
            tree = random_tree(np.random.default_rng(head_size), 6)
            AttentionCase([tree], [33], head_size=head_size, **options).check()
        for nodes in range(30):
            tree = random_tree(np.random.default_rng(nodes), nodes)
            AttentionCase([tree], [20], heads=1, kv_heads=1, **options).check()


def test_a_tree_of_256_nodes_beside_an_empty_one():
    trees = [random_tree(np.random.default_rng(1), 256), DraftTree.chain([])]
    AttentionCase(trees, [100, 5], heads=3, kv_heads=1).check()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("window", [-1, 70])
def test_threads_that_split_the_context_give_the_same(threads, window):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tree = random_tree(np.random.default_rng(2), 9)
        case = AttentionCase([tree, tree], [1500, 3], block_size=32, window=window, sinks=True)
        case.check()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_large_scores_are_exact(dtype):
    case = AttentionCase([random_tree(np.random.default_rng(3), 8)], [90], dtype=dtype)
    case.query *= 200
    case.check(atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"window": 20}, {"window": 64}, {"alibi": True}, {"soft_cap": 3.0},
     {"sinks": True}, {"alibi": True, "soft_cap": 3.0, "window": 20, "sinks": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_a_chain_equals_vllm(dtype, options):
    ops = pytest.importorskip("vllm._custom_ops")
    trees = [DraftTree.chain(range(n)) for n in (7, 3, 12)]
    contexts = [70, 0, 150]
    # vLLM's kernel multiplies the values of unused slots by 0, so they must be finite.
    case = AttentionCase(trees, contexts, block_size=32, dtype=dtype, gap=0, poison=0.0, **options)
    sizes = case.batch.sizes
    starts = torch.cat((case.batch.starts, sizes.sum()[None])).int()
    seq_lens = (sizes + case.batch.contexts).int()
    scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        len(trees), case.heads, case.kv_heads, case.head_size, seq_lens, dtype, starts,
        True, case.window, "vec", True,
    )  # fmt: skip
    blocks, kv_heads, block_size, _ = case.kv_cache.shape
    k, v = case.kv_cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    expected = torch.empty_like(case.query)
    sinks = case.sink_logits
    ops.cpu_attention_with_kv_cache(
        case.query, k, v, expected, starts, seq_lens, case.scale, True, case.alibi_slopes,
        case.window, case.block_table[case.batch.requests.long()].contiguous(), case.soft_cap,
        scheduler_metadata, sinks if dtype == torch.bfloat16 or sinks is None else sinks.float(),
    )  # fmt: skip
    torch.testing.assert_close(case.run(), expected, rtol=2 * ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize(
    "isa, head_size", [("vec", 64), ("vec16", 80), ("vec16", 48), ("amx", 64), ("amx", 96)]
)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_the_cache_layout_is_that_of_vllm(isa, head_size, dtype):
    ops = pytest.importorskip("vllm._custom_ops")
    packed = isa == "amx"
    if packed and (dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM uses AMX for bfloat16 only, on CPUs that have it")
    case = AttentionCase(
        [DraftTree.chain([1, 2])],
        [40],
        head_size=head_size,
        block_size=32 if packed else 16,
        dtype=dtype,
        gap=0,
        packed=packed,
    )
    cache = torch.full_like(case.kv_cache, case.poison)
    blocks, kv_heads, block_size, _ = cache.shape
    k, v = cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    slots = torch.arange(43)
    table = case.block_table[int(case.batch.requests[0])].long()
    slots = table[slots // block_size] * block_size + slots % block_size
    ops.cpu_attn_reshape_and_cache(case.keys[0], case.values[0], k, v, slots, isa)
    assert torch.equal(cache.nan_to_num(), case.kv_cache.nan_to_num())


def test_a_batch_without_trees_writes_nothing():
    case = AttentionCase([DraftTree.chain([1])], [4])
    assert case.run(TreeBatch.build([], [], [], [])).isnan().all()


def test_what_is_supported():
    assert supported(64, torch.bfloat16, 128)
    assert not supported(16, torch.bfloat16, 128)
    assert not supported(64, torch.float64, 128)
    assert not supported(64, torch.float32, 24)
    reads_packed = bool(native.load().lookahead_reads_packed())
    assert supported(64, torch.bfloat16, 32, packed=True) == reads_packed
    assert not supported(64, torch.float16, 32, packed=True)


COUNT_THREADS = """
import os, torch
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.attention.cpu import TreeCall, tree_attention
from lookahead_vllm.verify.layout.tree_batch import TreeBatch

torch.set_num_threads(3)
torch.ones(10**6).exp()
before = len(os.listdir("/proc/self/task"))
cache, table = torch.randn(9, 3, 128, 64), torch.arange(9).int()[None]
batch = TreeBatch.build([DraftTree.chain(range(7))], [0], [0], [1000])
query = torch.randn(8, 3, 32)
tree_attention(TreeCall(query, cache, query.clone(), table, batch, 1.0))
assert before >= 3
assert len(os.listdir("/proc/self/task")) == before
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_the_kernel_starts_no_threads_beside_torch():
    subprocess.run([sys.executable, "-c", COUNT_THREADS], check=True)
