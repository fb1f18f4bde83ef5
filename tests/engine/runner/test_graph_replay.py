"""A captured graph of steps with drafts replays any of them: the same addresses, right results.

vLLM's own code captures the graphs and builds the metadata; `recorded_graphs` stands in for CUDA,
plain torch for the kernels. Between two steps, everything that no step owns is poisoned.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.attention import gpu as gpu_attention
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees
from lookahead_vllm.engine.attention.branching import NOTHING_BRANCHES
from lookahead_vllm.engine.runner.draft_graphs import DraftGraphManager
from lookahead_vllm.engine.runner.graph_runner import GraphRunner
from lookahead_vllm.engine.step.drafts import Drafts
from lookahead_vllm.engine.step.placed_trees import PlacedTrees
from lookahead_vllm.verify.attention import PagedCall, paged_attention
from tests.support import recorded_graphs, torch_pages
from tests.support.attention_cases import random_tree
from tests.support.recorded_graphs import launch

REQUESTS, LONGEST, TOKENS = 8, 7, 32
BLOCK, BLOCKS_EACH = 16, 6
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
VOCAB = 50
LAYERS = ("first", "second")
GARBAGE = 1_000_003
APART = "FlashAttention, contexts apart, scheduled ahead"
KINDS = ("FlashAttention", "FlashAttention, scheduled ahead", APART, "Triton")


def embed(
    ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Stands in for a layer in front of attention."""
    angle = positions[:, None] * torch.arange(1, out.shape[1] + 1) / 50
    out.copy_(table[ids.long()] + angle.sin())


def write_kv(values: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """Stands in for vLLM's kernel that writes keys and values."""
    torch_pages.write(values.unflatten(1, (KV_HEADS, 2 * HEAD_SIZE)), slots, cache)


def attend(
    query: torch.Tensor, cache: torch.Tensor, metadata: Any, output: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Stands in for vLLM's attention; reads of the metadata what is on the device.

    With `lse`, it is not causal.
    """
    if (ahead := getattr(metadata, "scheduler_metadata", None)) is not None:
        assert torch.equal(ahead, schedule(metadata.seq_lens, metadata.max_query_len))
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    assert starts.diff().max() <= metadata.max_query_len
    assert lengths[: len(starts) - 1][starts.diff() > 0].max() <= metadata.max_seq_len
    assert metadata.causal == (lse is None) if hasattr(metadata, "causal") else lse is None
    query, output = (part.unflatten(1, (HEADS, HEAD_SIZE)) for part in (query, output))
    table, scale = metadata.block_table, HEAD_SIZE**-0.5
    found = torch_pages.attend(query, cache, starts, lengths, table, scale, lse is None, output)
    if lse is not None:
        lse[:, : starts[-1]] = found[:, : starts[-1]]


class PlainImpl:
    def forward(self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any,
                output: torch.Tensor, *more: Any) -> torch.Tensor:  # fmt: skip
        tokens = metadata.num_actual_tokens
        launch(attend, query[:tokens], cache, metadata, output[:tokens])
        return output


class Impl(gpu_attention._TreeImpl, PlainImpl):
    attn_type = AttentionType.DECODER
    head_size, scale, kv_cache_dtype = HEAD_SIZE, HEAD_SIZE**-0.5, "auto"
    sliding_window, alibi_slopes, logits_soft_cap, sinks = (-1, -1), None, 0.0, None

    def attend_contexts(
        self, query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        with torch.inference_mode(False):  # a replay writes to it, too
            lse = torch.full((HEADS, len(query)), -torch.inf)
        launch(attend, query, cache, metadata, output, lse)
        return lse


def schedule(cache_seqlens: torch.Tensor, max_seqlen_q: int, **options: Any) -> torch.Tensor:
    """Stands in for FlashAttention's schedule, which is made of the lengths and their bound."""
    return cache_seqlens.repeat_interleave(2) + max_seqlen_q


def builder_of(kind: str, config: Any) -> Any:
    """One of vLLM's builders, with trees."""
    if kind == "Triton":
        builder: Any = object.__new__(gpu_attention.TreeTritonAttentionMetadataBuilder)
        builder.seq_threshold_3D = builder.num_par_softmax_segments = 4
        builder.softmax_segm_output = builder.softmax_segm_max = torch.zeros(4)
        builder.softmax_segm_expsum = torch.zeros(4)
        builder.max_seqs_64_segments, builder.rswa_window = 0, None
    else:
        builder = object.__new__(gpu_attention.TreeFlashAttentionMetadataBuilder)
        builder.aot_schedule = kind.endswith("ahead")
        builder.aot_sliding_window = (-1, -1)
        builder.use_full_cuda_graph, builder.max_cudagraph_size = True, TOKENS
        builder.max_num_splits, builder.dcp_world_size, builder.rswa_window = 8, 1, None
        builder.scheduler_metadata = torch.zeros(4 * REQUESTS, dtype=torch.int32)
        builder.cache_config = SimpleNamespace(cache_dtype="auto")
        builder.kv_cache_dtype, builder.block_size = torch.float32, BLOCK
        builder.num_heads_q, builder.num_heads_kv, builder.headdim = HEADS, KV_HEADS, HEAD_SIZE
    builder.device = torch.device("cpu")
    return builder


class Engine:
    """The part of a GPU engine between a step's trees and its attention."""

    def __init__(self, kind: str) -> None:
        mode = CUDAGraphMode.FULL_AND_PIECEWISE
        config = recorded_graphs.config_of(mode, [1, 2, 4, 8, 16, TOKENS], REQUESTS)
        torch.manual_seed(0)
        self.table = torch.randn(VOCAB, HEADS * HEAD_SIZE)
        self.kv_table = torch.randn(VOCAB, 2 * KV_HEADS * HEAD_SIZE)
        blocks = REQUESTS * BLOCKS_EACH + 1
        self.caches = {name: torch.zeros(blocks, KV_HEADS, BLOCK, 2 * HEAD_SIZE) for name in LAYERS}
        self.query = torch.zeros(TOKENS, HEADS * HEAD_SIZE)
        self.kv = torch.zeros(TOKENS, 2 * KV_HEADS * HEAD_SIZE)
        self.outputs = {name: torch.zeros(TOKENS, HEADS * HEAD_SIZE) for name in LAYERS}
        # vLLM's persistent buffers.
        self.inputs = InputBuffers(REQUESTS, TOKENS, torch.device("cpu"))
        self.block_table = torch.zeros(REQUESTS, BLOCKS_EACH, dtype=torch.int32)
        self.slots = torch.zeros(1, TOKENS, dtype=torch.int64)
        self.builder = builder_of(kind, config)
        self.group = AttentionGroup(object, list(LAYERS), None, 0)  # type: ignore[arg-type]
        self.group.metadata_builders = [self.builder]
        self.kv_config: Any = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=list(LAYERS))]
        )
        self.model_state: Any = SimpleNamespace(
            max_model_len=BLOCK * BLOCKS_EACH,
            supports_mm_inputs=False,
            prepare_dummy_inputs=lambda *_: {},
        )
        self.model_state.prepare_attn = partial(DefaultModelState.prepare_attn, self.model_state)
        self.runner: Any = object.__new__(GraphRunner)
        self.runner._builders, self.runner.device = [self.builder], torch.device("cpu")
        self.runner._buffers, self.runner.attended = {}, AttendedTrees()
        self.runner._branching = NOTHING_BRANCHES._replace(merges_contexts=kind == APART)
        self.builder.attended = self.runner.attended
        self.runner.max_num_reqs, self.runner.decode_query_len = REQUESTS, LONGEST
        self.runner.max_model_len = self.model_state.max_model_len
        given = self.runner.attended, config, torch.device("cpu"), mode
        self.manager = DraftGraphManager(*given, decode_query_len=1)
        self.captured: dict[tuple[int, bool], Any] = {}
        """The metadata at the last capture of each number of tokens, with drafts and without."""

    def capture(self) -> None:
        sizes = self.manager.add_draft_graphs(LONGEST, self.runner._use_buffers)
        self.runner._make_buffers(sizes)
        tables = SimpleNamespace(
            cp_size=1,
            get_dummy_block_tables=lambda count: (self.block_table[:count].zero_(),),
            get_dummy_slot_mappings=lambda count: self.slots[:, :count].fill_(-1),
        )
        self.manager.capture(
            self.model, self.model_state, self.inputs, None, tables, [[self.group]], self.kv_config
        )

    def model(self, input_ids: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        count = len(input_ids)
        metadata = recorded_graphs.forward_context.attn_metadata
        if recorded_graphs._captured:
            drafts = metadata[LAYERS[0]].max_query_len > 1
            self.captured[count, drafts] = metadata[LAYERS[0]]
        for name in LAYERS:
            launch(embed, input_ids, positions, self.table, self.query[:count])
            launch(embed, input_ids, positions, self.kv_table, self.kv[:count])
            cache, output = self.caches[name], self.outputs[name][:count]
            launch(write_kv, self.kv, metadata[name].slot_mapping[:count], cache)
            Impl().forward(None, self.query[:count], None, None, cache, metadata[name], output)
        return output

    def poison(self, rng: np.random.Generator) -> None:
        """Overwrite all that the next step has to write itself."""
        for tensor in (self.query, self.kv, *self.outputs.values(), *self.caches.values()):
            tensor.fill_(torch.nan)
        self.inputs.input_ids.copy_(torch.from_numpy(rng.integers(0, VOCAB, TOKENS)))
        self.inputs.positions.fill_(GARBAGE)
        self.block_table.copy_(torch.from_numpy(rng.integers(0, 9, self.block_table.shape)))
        for graph in self.runner._buffers.values():
            graph.seq_lens.fill_(GARBAGE)
            graph.trees._packed.fill_(GARBAGE)


class Step:
    """A random step: trees, chains, and requests without a draft, padded for a graph or not."""

    def __init__(self, engine: Engine, seed: int, most: int) -> None:
        self.engine, self.rng = engine, np.random.default_rng(seed)
        rng = self.rng
        drafts: list[DraftTree] = []
        while len(drafts) < REQUESTS:
            left = most - sum(1 + len(tree) for tree in drafts)
            if left < 1 or (drafts and rng.random() < 0.2):
                break
            size = min(int(rng.integers(0, LONGEST)), left - 1)
            tree = random_tree(rng, size) if rng.random() < 0.7 else DraftTree.chain(range(size))
            drafts.append(DraftTree.from_lists(rng.integers(0, VOCAB, size), tree.parents))
        self.drafts = drafts
        self.lengths = np.array([1 + len(tree) for tree in drafts], np.int32)
        self.contexts = rng.integers(0, BLOCK * BLOCKS_EACH - LONGEST, len(drafts)).astype(np.int32)
        self.blocks = 1 + rng.permutation(REQUESTS * BLOCKS_EACH).reshape(REQUESTS, -1)
        self.texts = [rng.integers(0, VOCAB, context + 1) for context in self.contexts]
        given = Drafts(range(len(drafts)), DraftForest.of(drafts), self.contexts + 1)
        self.step = given.in_batch(given.req_ids, self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def graph(self) -> Any:
        """What runs it."""
        count = len(self.drafts)
        return self.engine.manager.dispatch(count, self.tokens, None, 0, max_query_len=LONGEST)

    def prepare(self, desc: Any) -> InputBatch:
        """Write vLLM's input buffers, as its runner does, and the positions of nodes."""
        engine, inputs = self.engine, self.engine.inputs
        count, padded = len(self.drafts), desc.num_reqs or len(self.drafts)
        starts = np.full(REQUESTS + 1, self.tokens, np.int32)
        starts[: count + 1] = [0, *np.cumsum(self.lengths)]
        inputs.query_start_loc.copy_(torch.from_numpy(starts))
        inputs.seq_lens.zero_()
        inputs.seq_lens[:count] = torch.from_numpy(self.contexts + self.lengths)
        engine.slots.fill_(-1)
        for row, (tree, context) in enumerate(zip(self.drafts, self.contexts, strict=True)):
            own = slice(starts[row], starts[row + 1])
            ids = np.array([self.texts[row][-1], *tree.tokens])
            inputs.input_ids[own] = torch.from_numpy(ids).int()
            inputs.positions[own] = torch.from_numpy(np.array([context, *context + tree.depths]))
            engine.block_table[row] = torch.from_numpy(self.blocks[row])
            slots = np.arange(context, context + len(ids))
            places = self.blocks[row, slots // BLOCK] * BLOCK + slots % BLOCK
            engine.slots[0, own] = torch.from_numpy(places)
            self.write_context(row)
        dummy = InputBatch.make_dummy(count, self.tokens, InputBuffers(REQUESTS, TOKENS, "cpu"))  # type: ignore[arg-type]
        return replace(
            dummy,
            num_reqs_after_padding=padded,
            num_scheduled_tokens=self.lengths,
            num_tokens_after_padding=max(desc.num_tokens, self.tokens),
            query_start_loc=inputs.query_start_loc[: padded + 1],
            query_start_loc_np=starts[: padded + 1],
            seq_lens=inputs.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(np.pad(self.contexts + self.lengths,
                                                             (0, padded - count))),
            max_query_len=desc.max_query_len,
        )  # fmt: skip

    def write_context(self, row: int) -> None:
        """The keys and values of the committed tokens before the root."""
        context = int(self.contexts[row])
        ids = torch.from_numpy(self.texts[row][:context])
        kv = torch.empty(context, self.engine.kv.shape[1])
        embed(ids, torch.arange(context), self.engine.kv_table, kv)
        slots = np.arange(context)
        places = torch.from_numpy(self.blocks[row, slots // BLOCK] * BLOCK + slots % BLOCK)
        for cache in self.engine.caches.values():
            write_kv(kv, places, cache)

    def run(self, desc: Any) -> tuple[Any, list[torch.Tensor]]:
        """The metadata of the step, and the rows of each layer, in a graph or outside of one."""
        engine, runner = self.engine, self.engine.runner
        engine.poison(self.rng)
        batch = self.prepare(desc)
        runner._choose_buffers(batch)
        runner._attend(self.step)
        count = batch.num_tokens_after_padding if desc.cg_mode == CUDAGraphMode.FULL else None
        metadata = engine.model_state.prepare_attn(
            batch,
            desc.cg_mode,
            (engine.block_table[: desc.num_reqs or len(self.drafts)],),
            engine.slots[:, : count or self.tokens],
            [[engine.group]],
            engine.kv_config,
        )
        if count:
            engine.manager.run_fullgraph(desc)
        else:
            recorded_graphs.forward_context.attn_metadata = metadata
            own = slice(self.tokens)
            engine.model(engine.inputs.input_ids[own], engine.inputs.positions[own])
        return metadata[LAYERS[0]], [out[: self.tokens].clone() for out in engine.outputs.values()]


def tensors_of(metadata: Any) -> dict[str, tuple[Any, ...]]:
    """Address, shape and strides of every tensor of the metadata and of its trees."""
    parts = dict(vars(metadata))
    trees = parts.pop("trees", None)
    parts.update({f"trees.{name}": t for name, t in (vars(trees) if trees else {}).items()})
    return {
        name: (tensor.data_ptr(), tensor.shape, tensor.stride())
        for name, tensor in parts.items()
        if isinstance(tensor, torch.Tensor)
    }


def values_of(metadata: Any) -> dict[str, Any]:
    """What a graph keeps of the metadata that is no tensor."""
    return {
        name: value
        for name, value in vars(metadata).items()
        if not isinstance(value, torch.Tensor) and name not in ("trees", "max_seq_len")
    }


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    recorded_graphs.enable(monkeypatch)
    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", schedule, raising=False)

    def attend_trees(call: PagedCall, impl: Any) -> None:
        query = call.query.unflatten(1, (HEADS, HEAD_SIZE))
        launch(paged_attention, call._replace(query=query), impl=impl)

    monkeypatch.setattr(gpu_attention, "paged_attention", attend_trees)
    made = Engine(request.param)
    made.capture()
    yield made


def test_every_step_of_a_size_replays_its_graph(engine):
    kinds = {"trees": 0, "chains": 0, "bare": 0}
    sizes = set()
    eager = SimpleNamespace(
        cg_mode=CUDAGraphMode.NONE, num_tokens=0, num_reqs=None, max_query_len=None
    )
    for seed in range(60):
        step = Step(engine, seed, most=(4, 8, 16, TOKENS)[seed % 4])
        if step.tokens == len(step.drafts):
            continue
        desc = step.graph()
        assert desc.max_query_len == LONGEST
        metadata, rows = step.run(desc)
        captured = engine.captured[desc.num_tokens, True]
        assert tensors_of(metadata) == tensors_of(captured), "a tensor has moved"
        assert values_of(metadata) == values_of(captured)
        assert metadata.max_seq_len <= captured.max_seq_len
        own = metadata.trees
        branching = int(step.step.forest.branching.sum())
        if metadata.is_of_contexts:
            assert metadata.seq_lens[: len(step.contexts)].tolist() == step.contexts.tolist()
        else:  # vLLM's kernel spends no time on the contexts of trees
            trees = own.requests[:branching].long()
            assert torch.equal(metadata.seq_lens[trees], own.sizes[:branching])
        _, expected = step.run(eager)
        for one, other in zip(rows, expected, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        kinds["trees"] += branching
        kinds["chains"] += len(step.step.forest) - branching
        kinds["bare"] += len(step.drafts) - len(step.step.forest)
        sizes.add(desc.num_tokens)
    assert sizes == {4, 8, 16, TOKENS} and min(kinds.values()) > 10


def test_a_tail_that_cannot_be_captured_leaves_the_graphs(engine):
    def make_tail(desc: Any, num_choices: int) -> Any:
        raise RuntimeError("as planned")

    other = Engine(KINDS[0])
    other.manager.make_tail = make_tail
    other.capture()
    assert not other.manager.tails and other.manager.graphs.keys() == engine.manager.graphs.keys()
    assert other.manager.needs_capture() and not recorded_graphs._captured
    other.manager.tp_size = 2
    with pytest.raises(RuntimeError, match="as planned"):
        other.manager.capture_tails()


def test_graphs_without_drafts_have_no_trees(engine):
    assert {size for size, drafts in engine.captured if drafts} == {2, 4, 8, 16, TOKENS}
    for (_, drafts), metadata in engine.captured.items():
        assert hasattr(metadata, "trees") is drafts
    # A step without drafts reads none of the buffers.
    step = Step(engine, 3, most=TOKENS)
    step.drafts = [DraftTree.chain([])] * len(step.drafts)
    step.lengths = np.ones_like(step.lengths)
    step.step = PlacedTrees.of_dummies([], 0)
    count = len(step.drafts)
    desc = engine.manager.dispatch(count, count, 1, 0, max_query_len=LONGEST)
    metadata, rows = step.run(desc)
    assert desc.max_query_len is None and metadata.max_query_len == 1
    own = {graph.seq_lens.data_ptr() for graph in engine.runner._buffers.values()}
    assert not own & {address for address, *_ in tensors_of(metadata).values()}
    assert rows[0].isfinite().all()
    assert all((graph.seq_lens == GARBAGE).all() for graph in engine.runner._buffers.values())


def test_a_measured_pass_with_trees_keeps_its_contexts(engine):
    """vLLM builds the metadata of dummy runs in graphs as for a capture; Triton's have no context
    then."""
    step = next(s for s in (Step(engine, seed, most=16) for seed in range(99)) if s.step.branches)
    desc = step.graph()
    batch = step.prepare(desc)
    engine.runner._choose_buffers(batch)
    engine.runner._attend(step.step)
    metadata = engine.model_state.prepare_attn(
        batch, desc.cg_mode, (engine.block_table[: desc.num_reqs],),
        engine.slots[:, : desc.num_tokens], [[engine.group]], engine.kv_config, for_capture=True,
    )  # fmt: skip
    expected = step.contexts + step.lengths
    rows = step.step.rows[step.step.forest.branching]
    expected[rows] = step.lengths[rows]
    if metadata[LAYERS[0]].is_of_contexts:
        expected = step.contexts
    assert metadata[LAYERS[0]].seq_lens[: len(expected)].tolist() == expected.tolist()
