"""Attention of trees on a GPU, without one: overwritten rows, warm-up, which layers have trees.

The kernels have their own tests (`tests/verify/attention/test_paged_attention.py`); here they are
stood in for by plain torch.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import ParallelConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, QueryLenSupport
from vllm.v1.attention.backend import AttentionType

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine.attention import branching
from lookahead_vllm.engine.attention import cpu as cpu_attention
from lookahead_vllm.engine.attention import gpu as gpu_attention
from lookahead_vllm.engine.attention import latent as worker_latent_attention
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees
from lookahead_vllm.engine.attention.branching import branching_obstacle
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.verify import latent as latent_attention
from lookahead_vllm.verify.attention import PagedCall, paged_attention
from lookahead_vllm.verify.latent import LatentCall
from lookahead_vllm.verify.layout.fixed_batch import FixedBatch
from lookahead_vllm.verify.layout.paged_batch import PagedBatch
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from tests.support.attention_cases import PagedAttentionCase, random_tree

UNTOUCHED = 7.0


@dataclass
class Common:
    """The part of vLLM's CommonAttentionMetadata that counts here."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor


class PlainBuilder:
    device = torch.device("cpu")

    def build(self, common_prefix_len: int, common: Common, fast_build: bool = False) -> Any:
        return SimpleNamespace(**vars(common))


class Builder(gpu_attention._TreeBuilder, PlainBuilder):
    pass


class PlainImpl:
    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv: Any, metadata: Any,
                output: torch.Tensor, *more: Any) -> torch.Tensor:  # fmt: skip
        return output.fill_(UNTOUCHED)


class Impl(gpu_attention._TreeImpl, PlainImpl):
    attn_type = AttentionType.DECODER

    def __init__(self, case: PagedAttentionCase) -> None:
        self.head_size, self.scale = case.head_size, case.scale
        # As vLLM's two backends keep them.
        self.sliding_window = (case.window - 1, 0) if case.window > 0 else (-1, -1)
        self.alibi_slopes, self.logits_soft_cap = case.alibi_slopes, case.soft_cap
        self.sinks = case.sink_logits
        self.kv_cache_dtype = "fp8" if case.fp8 else "auto"


@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20, "sinks": True}, {"alibi": True, "soft_cap": 5.0}, {"fp8": True}],
    ids=str,
)
def test_only_rows_of_trees_are_overwritten(layout, options):
    trees = [random_tree(np.random.default_rng(i), 9 * i + 1) for i in range(3)]
    case = PagedAttentionCase(trees, [70, 3, 33], layout=layout, head_size=64, gap=2, **options)
    lengths = torch.full((len(case.block_table),), 100, dtype=torch.int32)
    common = Common(lengths, case.block_table)
    builder = Builder()
    plain = builder.build(0, common)
    assert torch.equal(plain.seq_lens, lengths) and not hasattr(plain, "trees")

    builder.attended = AttendedTrees(trees=case.batch)
    metadata = builder.build(0, common)
    # vLLM's own kernel is told that a tree has no context.
    rows = case.batch.requests.long()
    assert torch.equal(metadata.seq_lens[rows], case.batch.sizes)
    assert (lengths == 100).all() and (metadata.seq_lens == 100).sum() == 2

    kv_cache = case.paged_cache.transpose(1, 2)  # vLLM's logical order, whatever the memory's is
    output, query, layer = torch.empty_like(case.query), case.query, None
    if case.fp8:
        kv_cache = kv_cache.view(torch.uint8)
        layer = SimpleNamespace(_q_scale=torch.tensor(0.01))
        layer._k_scale, layer._v_scale = case.scales["k_scale"], case.scales["v_scale"]
        query = (query / 0.01).to(torch.float8_e4m3fn)
        case.query = query.float() * 0.01
    Impl(case).forward(layer, query, None, None, kv_cache, metadata, output)
    expected = case.reference()
    is_tree = expected.isfinite().flatten(1).all(1)
    torch.testing.assert_close(output[is_tree].double(), expected[is_tree], rtol=1e-5, atol=1e-5)
    assert (output[~is_tree] == UNTOUCHED).all() and len(output) - is_tree.sum() == 8

    Impl(case).forward(layer, query, None, None, kv_cache, plain, output)
    assert (output == UNTOUCHED).all()
    Impl(case).forward(layer, query, None, None, kv_cache, None, output)  # a profile run


@pytest.mark.parametrize("fp8", [False, True])
def test_warming_up_runs_every_kind_of_batch_and_changes_nothing(fp8, monkeypatch):
    case = PagedAttentionCase([random_tree(np.random.default_rng(0), 9)], [70], fp8=fp8)
    layer = layer_of(case)
    if fp8:
        layer.kv_cache = layer.kv_cache.view(torch.uint8)
    layer._k_scale, layer._v_scale = case.scales.get("k_scale"), case.scales.get("v_scale")
    before = layer.kv_cache.clone()
    kinds: list[tuple[int, int]] = []

    def count(call: PagedCall, impl: Any) -> None:
        kinds.append((call.batch.max_size, call.batch.max_context))
        output = call.output.clone()
        paged_attention(call, impl)
        assert torch.equal(call.output, output)

    monkeypatch.setattr(gpu_attention, "paged_attention", count)
    ON_GPU.warm_up([layer, layer], case.dtype)
    assert len(set(kinds)) * 2 == len(kinds) == 8  # 16 and 32 rows, split or not, in two layers
    assert torch.equal(before.view(torch.uint8), layer.kv_cache.view(torch.uint8))


def layer_of(case: PagedAttentionCase) -> Any:
    impl = Impl(case)
    impl.num_heads, impl.num_kv_heads = case.heads, case.kv_heads
    return SimpleNamespace(impl=impl, kv_cache=case.paged_cache.transpose(1, 2))


def test_xformers_computes_trees_in_graphs_alone(monkeypatch):
    """Outside of them, it would be compiled for each shape of a batch, while requests wait."""
    case = PagedAttentionCase([random_tree(np.random.default_rng(0), 9)], [70])
    layer, used = layer_of(case), []
    monkeypatch.setattr(gpu_attention, "paged_attention", lambda call, impl: used.append(impl))
    ON_GPU.warm_up([layer], case.dtype, "xformers")
    assert used == [*["auto"] * 4, "xformers"]
    fixed = FixedBatch(16, 1, 16, 100, "cpu").batch
    for trees, impl in ((case.paged_batch, "auto"), (fixed, "xformers")):
        metadata = SimpleNamespace(trees=trees, is_of_contexts=False, block_table=None)
        layer.impl.forward(layer, case.query, None, None, layer.kv_cache, metadata, case.output)
        assert used[-1] == impl


def test_what_xformers_cannot_compute_stops_the_start():
    case = PagedAttentionCase([random_tree(np.random.default_rng(0), 9)], [70])
    for layer, reason in (
        (layer_of(case), "no attention over pages in float32"),
        (latent_layer(), "no latent attention"),
    ):
        with pytest.raises(OptionError, match=f'attention="xformers".*{reason}; leave attention'):
            ON_GPU.warm_up([layer], case.dtype, "xformers")


def layer_with(k_scale: torch.Tensor | None = None, **of_impl: Any) -> Any:
    cache = torch.empty(0, dtype=torch.bfloat16)
    return SimpleNamespace(impl=SimpleNamespace(**of_impl), kv_cache=cache, _k_scale=k_scale)


LAYER = layer_with()
ON_GPU = gpu_attention.GPUTreeAttention()


def group(
    backend: type = gpu_attention.TreeFlashAttentionBackend, head_size: int = 128, **model: Any
) -> Any:
    config = SimpleNamespace(
        **{"rswa_window": None, "is_mm_prefix_lm": False, "dtype": torch.bfloat16, **model}
    )
    builder = SimpleNamespace(headdim=head_size, vllm_config=SimpleNamespace(model_config=config))
    return SimpleNamespace(backend=backend, get_metadata_builder=lambda: builder)


def test_layers_without_tree_attention_get_chains():
    obstacle = ON_GPU.obstacle
    assert obstacle(group(), [LAYER], "auto") is None
    triton = group(gpu_attention.TreeTritonAttentionBackend)
    for cache in ("bfloat16", "fp8", "fp8_e4m3"):
        assert obstacle(triton, [LAYER], cache) is None
    for case, layer, cache, says in (
        (group(PlainImpl), LAYER, "auto", "for the backend PlainImpl"),
        (group(), LAYER, "fp8_e5m2", "over a KV cache of fp8_e5m2"),
        (triton, LAYER, "fp8_per_token_head", "over a KV cache of fp8_per_token_head"),
        (group(head_size=512), LAYER, "auto", "for heads of 512"),
        (group(dtype=torch.float16), LAYER, "bfloat16", "holds torch.bfloat16, not the model's"),
        (group(is_mm_prefix_lm=True), LAYER, "auto", "rows attend to more"),
        (triton, layer_with(chunk_lookback=4), "auto", "a chunk"),
        (group(), layer_with(k_scale=torch.ones(2)), "fp8", "a scale for each head"),
        (triton, layer_with(use_alibi_sqrt=True), "auto", "ALiBi"),
    ):
        assert says in str(obstacle(case, [layer], cache))


def config_that_branches(model: Any = None, **others: Any) -> Any:
    """Of an engine whose trees may branch, with changes."""
    own: dict[str, Any] = dict(uses_mrope=False, multimodal_config=None, is_encoder_decoder=False)
    own["hf_text_config"] = SimpleNamespace()
    config = dict(
        model_config=SimpleNamespace(**own | (model or {})),
        kv_transfer_config=None,
        aux_output_config=SimpleNamespace(enabled=False),
        parallel_config=ParallelConfig(),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    return SimpleNamespace(**config | others)


def with_videos(prunes: bool) -> dict[str, Any]:
    multimodal = SimpleNamespace(is_multimodal_pruning_enabled=lambda: prunes)
    return dict(uses_mrope=True, multimodal_config=multimodal)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"parallel_config": ParallelConfig(ubatch_size=2)}, "several batches"),
        ({"model": with_videos(prunes=False)}, None),
        ({"model": with_videos(prunes=True)}, "prunes video tokens"),
        ({"model": {"hf_text_config": SimpleNamespace(index_topk=2048)}}, "sparse indexer"),
        ({"kv_transfer_config": object()}, "KV leaves the engine"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "returns the experts"),
    ],
)
def test_engines_that_verify_no_trees(changes, says):
    obstacle = branching_obstacle(config_that_branches(**changes), [], ON_GPU)
    assert obstacle is says is None or str(says) in str(obstacle)


def latent_layer(kind: type = MLAAttention, **settings: Any) -> Any:
    """A layer of latent attention with 3 heads, over 4 blocks of latents of 8 + 4 dimensions."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    sizes = dict(num_heads=3, qk_nope_head_dim=6, qk_rope_head_dim=4, qk_head_dim=10)
    parts = dict(kv_lora_rank=8, v_head_dim=5, scale=0.3, use_sparse=False, sliding_window=None)
    flags = dict(kv_cache_dtype="auto", is_amx_bmm_enabled=False)
    flags |= dict(is_aiter_triton_fp4_bmm_enabled=False, is_aiter_triton_fp8_bmm_enabled=False)
    weights = dict(W_UK_T=torch.randn(3, 6, 8), W_UV=torch.randn(3, 8, 5))
    cache = dict(kv_cache=torch.randn(4, 16, 12))
    for name, value in (sizes | parts | flags | weights | cache | settings).items():
        setattr(layer, name, value)
    return layer


class PaddedAttention(MLAAttention):
    pass


def test_latent_layers_without_tree_attention_get_chains():
    passes = SimpleNamespace(fuse_attn_quant=False)
    model = SimpleNamespace(dtype=torch.float32)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(pass_config=passes), model_config=model
    )
    builder = SimpleNamespace(vllm_config=config)
    case = SimpleNamespace(backend=PlainImpl, get_metadata_builder=lambda: builder)
    amx = latent_layer()
    del amx.W_UK_T
    for attention in (cpu_attention.CPUTreeAttention(), ON_GPU):
        for cache in ("auto", "fp8", "fp8_e4m3"):
            assert attention.obstacle(case, [latent_layer()], cache) is None
        bfloat16 = latent_layer(kv_cache=torch.empty(0, dtype=torch.bfloat16))
        assert "holds torch.bfloat16" in str(attention.obstacle(case, [bfloat16], "bfloat16"))
        for layer, cache, says in (
            (amx, "auto", "for the backend PlainImpl"),
            (latent_layer(PaddedAttention), "auto", "for the backend PlainImpl"),
            (latent_layer(sliding_window=64), "auto", "the whole context"),
            (latent_layer(use_sparse=True), "auto", "the whole context"),
            (latent_layer(), "fp8_ds_mla", "a latent cache of fp8_ds_mla"),
        ):
            assert says in str(attention.obstacle(case, [layer], cache))
        passes.fuse_attn_quant = True
        assert "quantizes" in str(attention.obstacle(case, [latent_layer()], "auto"))
        passes.fuse_attn_quant = False


def test_warming_up_latent_attention_changes_nothing(monkeypatch):
    pytest.importorskip("triton")
    layer, contexts = latent_layer(), []
    before = layer.kv_cache.clone()

    def count(call: LatentCall) -> None:
        contexts.append(call.batch.max_context)
        latent_attention.latent_attention(call)

    monkeypatch.setattr(worker_latent_attention, "latent_attention", count)
    ON_GPU.warm_up([layer], torch.float32)
    assert len(contexts) == 2 and torch.equal(before, layer.kv_cache)  # split or not


def test_only_rows_of_trees_are_overwritten_by_latent_attention():
    """vLLM's part stands for a batch of a decode, two trees and a prompt."""
    layer = latent_layer()
    trees = [DraftTree.from_lists([1, 2, 3], [-1, -1, 1]), DraftTree.from_lists([4, 5], [-1, -1])]
    batch = PagedBatch.build(TreeBatch.build(trees, [1, 2], [1, 5], [20, 3]))
    table = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]], dtype=torch.int32)
    q, output = torch.randn(12, 3, 10), torch.full((12, 15), UNTOUCHED)
    step = worker_latent_attention.StepTrees(batch, table)
    metadata = SimpleNamespace(trees=step)

    def plain(*args: Any) -> torch.Tensor:
        return output

    forward = worker_latent_attention._then_trees(plain)
    forward(layer, q, None, None, layer.kv_cache, SimpleNamespace(), output)
    assert (output == UNTOUCHED).all()
    assert forward(layer, q, None, None, layer.kv_cache, metadata, output) is output
    is_tree = (output != UNTOUCHED).any(1)
    assert is_tree.tolist() == [False] + [True] * 7 + [False] * 4
    # The second node of the second tree, expanded: K and V of every head.
    slots = [*range(3), 3, 5]
    latents = layer.kv_cache[table[2, 0], slots]
    k = torch.einsum("npl,kl->nkp", layer.W_UK_T, latents[:, :8])
    k = torch.cat((k, latents[:, 8:].expand(3, -1, -1)), dim=-1)
    v = torch.einsum("kl,nlv->nkv", latents[:, :8], layer.W_UV)
    weights = (torch.einsum("np,nkp->nk", q[7], k) * layer.scale).softmax(-1)
    expected = torch.einsum("nk,nkv->nv", weights, v).flatten()
    torch.testing.assert_close(output[7], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("support", "says"),
    [("VARLEN", None), ("UNIFORM", "as prompts"), ("SINGLE_ONLY", "as prompts")],
)
def test_latent_backends_that_need_equally_many_rows_get_no_drafts(support, says, monkeypatch):
    builder = SimpleNamespace(query_len_support=QueryLenSupport[support])
    found = SimpleNamespace(backend=PlainImpl, get_metadata_builder=lambda: builder)
    reason = ON_GPU.unsupported_rows([found])
    assert reason is says or str(says) in str(reason)
    assert not ON_GPU.unsupported_rows(
        [SimpleNamespace(backend=PlainImpl, get_metadata_builder=SimpleNamespace)]
    )
    monkeypatch.setattr(branching, "branching_obstacle", lambda *_: "the test says so")
    config: Any = SimpleNamespace(parallel_config=ParallelConfig())
    assert branching.decide(config, [found], [], ON_GPU).has_drafts is (says is None)
