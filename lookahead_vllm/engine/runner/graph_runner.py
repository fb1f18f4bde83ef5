"""Steps with drafts in captured graphs, on Model Runner V2."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, set_dummy_context
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from lookahead_vllm.draft.growth.recycling import NUM_CHOICES
from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.engine import patches
from lookahead_vllm.engine.attention.attended_trees import GraphBuffers
from lookahead_vllm.engine.attention.branching import NOTHING_BRANCHES
from lookahead_vllm.engine.cost.timed_passes import CapturedTokens
from lookahead_vllm.engine.runner.draft_graphs import DraftGraphManager
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.engine.step.placed_trees import NO_DRAFTS, PlacedTrees
from lookahead_vllm.engine.step.sampler import RootSampler
from lookahead_vllm.engine.step.step import State, Step
from lookahead_vllm.engine.step.tail import Draws, Emitted, Sampled, run_tail
from lookahead_vllm.verify.layout.fixed_batch import NO_STARTS, FixedBatch
from lookahead_vllm.verify.layout.node_layout import width_for, width_of

logger = init_logger(f"vllm.{__name__}")

TAILS = "LOOKAHEAD_VLLM_TAILS"
"""The environment variable with which sampling is left out of graphs."""


class GraphRunner(LookaheadRunner):
    """Mixin: steps with drafts run in captured graphs if the attention backends support it.

    Steps without drafts keep plain vLLM's graphs.
    """

    cudagraph_manager: DraftGraphManager | None
    _starts = NO_STARTS
    """The first row of each request of a batch that vLLM has prepared with its drafts."""
    _emitted: Emitted
    _copied: Any = None
    """The event after which these may be written again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._buffers: dict[int, GraphBuffers] = {}
        """The buffers of each graph, by its number of tokens, if trees may branch."""
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # With speculative decoding, vLLM 0.33 would compile some 90 kernels for top-k and top-p at
        # start-up, for minutes. Roots and nodes are sampled like plain vLLM's rows, without them.
        with patches.swapped(topk_topp_sampler, "register_top_k_top_p_warmups", lambda: None):
            super().load_model(*args, **kwargs)

    # ---- what is captured ------------------------------------------------------------------------

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        # Graphs for requests that all have the longest draft would be of no use.
        with (
            patches.swapped(self, "decode_query_len", 1),
            patches.swapped(
                model_runner, "ModelCudaGraphManager", partial(DraftGraphManager, self.attended)
            ),
        ):
            super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        manager = self.cudagraph_manager
        assert manager is not None
        if self.dp_size > 1 and manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            # All ranks must run the same kind of graph, and vLLM's graphs for any batch have no
            # tree attention.
            self._forbid_branches("cudagraph_mode is FULL, and there are several engines")
        manager.before_replay, manager.begin_graph = self._choose_graph, self._begin_graph
        if self._may_have_tails():
            manager.make_tail = self._make_tail
            if self.drafter.options.proposer != "ngram_trie":  # "auto" becomes "hybrid" later
                manager.numbers_of_choices = 0, NUM_CHOICES
            sampler = self.sampler
            sampler.draws = sampler.draws or Draws(self.max_num_reqs, self.device)
            width = width_for(self.decode_query_len - 1)
            self._emitted = Emitted.empty(self.max_num_reqs, width, self.device)
        self._buffers = {}
        if reason := self._varlen_obstacle():
            logger.info_once("Lookahead runs steps with drafts in pieces: %s.", reason)
        elif self.drafter.may_branch:
            sizes = manager.add_draft_graphs(self.decode_query_len, self._use_buffers)
            self._make_buffers(sizes)
        else:
            manager.add_draft_graphs(self.decode_query_len)
        if is_profiling:
            self._branching = NOTHING_BRANCHES  # its movers would keep these KV caches alive

    def _may_have_tails(self) -> bool:
        """Whether the tail of a step may be captured; which steps it serves is found by request."""
        sampler: Any = self.sampler
        return (
            os.environ.get(TAILS, "1") != "0"
            and self._shape.is_possible
            and self.trained is None  # it reads `Step.order`
            and type(sampler) is RootSampler
            and not sampler.compute_nans
            and not sampler.return_sampling_mask
            and sampler.trace_replay_state is None
            and self.batch_sharder is None
        )

    def _forbid_branches(self, reason: str) -> None:
        if self.drafter.may_branch:
            logger.info_once("Lookahead verifies chains, not trees, here: %s.", reason)
        self.drafter.may_branch = False
        self._branching = NOTHING_BRANCHES

    def _varlen_obstacle(self) -> str | None:
        """Why no graph can run requests with various numbers of tokens, or None if one can."""
        if self.pcp_manager is not None:
            return "prompts are split over ranks"
        if self.drafter.may_branch and self.model_config.use_mla:
            return "latent attention of trees has no fixed buffers"
        support, backend = self.model_state.get_additional_cg_support()
        if support != AttentionCGSupport.ALWAYS:
            return f"{backend} does not support graphs of them"
        unsupported = get_varlen_cudagraph_unsupported_backend(
            self.attn_groups, self.vllm_config, self.decode_query_len
        )
        return unsupported and f"{unsupported[0]} does not support graphs of them"

    def _make_buffers(self, sizes: list[int]) -> None:
        seq_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)
        for size in sizes:
            trees = FixedBatch(
                size,
                self.max_num_reqs,
                self.decode_query_len,
                self.max_model_len,
                self.device,
                seq_lens if self._branching.merges_contexts else None,
            )
            self._buffers[size] = GraphBuffers(trees, seq_lens, {})

    def _use_buffers(self, num_tokens: int | None) -> None:
        """Called before a capture: the metadata builders use the buffers of this graph."""
        self.attended.graph = None if num_tokens is None else self._buffers[num_tokens]
        self._attend(NO_DRAFTS)

    def without_full_graphs(self) -> AbstractContextManager[Any]:
        assert self.cudagraph_manager is not None
        return self.cudagraph_manager.in_pieces()

    def attends_in_graphs(self) -> bool:
        # vLLM's Triton backend captures, and runs dummies, with a context of one token.
        return not any(isinstance(b, TritonAttentionMetadataBuilder) for b in self._builders)

    def captured_tokens(self) -> CapturedTokens:
        assert self.cudagraph_manager is not None
        return self.cudagraph_manager.captured_tokens()

    # ---- a step ----------------------------------------------------------------------------------

    def gather_batch_req_state(self, scheduler_output: SchedulerOutput, dummy_run: bool) -> Any:
        found = super().gather_batch_req_state(scheduler_output, dummy_run)
        forest = (self._dummy_step if dummy_run else self.step.drafts).forest
        awaits_drafts = not dummy_run and self.step.is_prepared_early and self.step.has_slots
        may_branch = awaits_drafts and self.drafter.may_branch
        self.attended.may_branch = may_branch or bool(forest.branching.any())
        return found

    def most_early_nodes(self, num_reqs: int, slots: int) -> int:
        manager = self.cudagraph_manager
        if manager is None:
            return super().most_early_nodes(num_reqs, slots)
        most = manager.most_draft_tokens() - num_reqs
        # A fixed budget says how many nodes to send, in a graph or not.
        if most >= slots or (most > 0 and self.drafter.options.budget == "auto"):
            return most
        is_eager = manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.NONE
        return super().most_early_nodes(num_reqs, slots) if is_eager else 0

    def may_size(self, scheduled: SchedulerOutput) -> bool:
        manager = self.cudagraph_manager
        is_full = manager and manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
        return not is_full and super().may_size(scheduled)

    def places_roots(self, num_reqs: int) -> bool:
        manager = self.cudagraph_manager
        graph = manager and manager.plain(num_reqs)
        return bool(manager and graph and manager.tail_of(graph))

    def _choose_graph(self, prepared: BatchExecutionDescriptor) -> BatchExecutionDescriptor:
        """The graph that runs a step; see `DraftGraphManager.before_replay`.

        A step that vLLM has prepared for all slots gets its drafts here, and the smallest graph
        that holds them. One without slots waits for nothing.
        """
        step, shape, manager = self.step, self._shape, self.cudagraph_manager
        if step.state is not State.PREPARED:
            if prepared.max_query_len is not None:  # the tokens of the step before have arrived
                shape.clear()
            return prepared
        assert manager is not None
        if step.has_slots:
            self._draft(step)
        num_reqs = step.prepared.num_reqs
        desc = manager.smallest(num_reqs, num_reqs + step.drafts.forest.num_nodes)
        graph = None if desc.max_query_len is None else self._buffers.get(desc.num_tokens)
        step.graph = desc
        shape.share_out(step, graph and graph.trees)
        if graph is None:
            tail = manager.tail_of(desc)
            shape.place(max(prepared.num_tokens, tail.num_tokens if tail else 0))
            if not all(getattr(builder, "reads_buffers", False) for builder in self._builders):
                self._settle(step)
                self._metadata_of(step, CUDAGraphMode.FULL)
        step.elapsed = self._tick()
        return desc

    def _begin_graph(self, desc: BatchExecutionDescriptor) -> None:
        """Launch what a graph with trees does before the model; see `DraftGraphManager`.

        So after a step's drafts are known, nothing but the graph has to be launched.
        """
        graph = self._buffers.get(desc.num_tokens)
        if graph is not None:
            if self._shape.is_possible:  # else `fill` copies the trees of every step
                graph.trees.upload()
            self._shape.place_in_graph(desc, graph.seq_lens, graph.trees.holds_all)
            for builder in self._builders:
                builder.refresh(graph)

    # ---- its tail --------------------------------------------------------------------------------

    def _make_tail(self, desc: BatchExecutionDescriptor, num_choices: int) -> Callable[[], Sampled]:
        """The tail of steps that run in this graph, with so many of the model's choices at each
        row; see `DraftGraphManager`."""
        manager, sampler, model = self.cudagraph_manager, self.sampler, self.model
        assert manager is not None and manager.hidden_states is not None
        hidden = manager.hidden_states[: desc.num_tokens]
        rows, indices = self._shape.rows_in_graph(desc)
        movers, emitted = self._branching.movers, self._emitted
        draws, fp64 = sampler.draws, sampler.use_fp64_gumbel
        self._shape.warm_up()  # what the capture of the model has left there is no step

        def launch() -> Sampled:
            logits = model.compute_logits(hidden)
            return run_tail(logits, rows, indices, draws, movers, emitted, fp64, num_choices)

        return launch

    def _fits_tail(self, step: Step) -> bool:
        """Whether the graph of a step has a tail that does all that its requests need."""
        manager = self.cudagraph_manager
        if step.graph is None or manager is None or manager.tail_of(step.graph) is None:
            return False
        return bool(self.sampler.draws.suffices[step.prepared.idx_mapping_np].all())

    def sample(self, hidden_states: torch.Tensor, batch: InputBatch, grammar: Any) -> Any:
        step, manager = self.step, self.cudagraph_manager
        if not step.has_tail:
            return super().sample(hidden_states, batch, grammar)
        assert manager is not None and step.graph is not None
        num_choices = self._num_choices_of(step)
        if self._copied is not None:  # the tokens of the last tail
            self.main_stream.wait_event(self._copied)
        sampled: Sampled = manager.replay_tail(manager.tail_of(step.graph), num_choices)
        if sampled.choices is not None:
            self._collect_choices(sampled.choices, batch)
        tokens, *counts = (part[: batch.num_reqs] for part in sampled[:3])
        return SamplerOutput(tokens, None, None, *counts), *counts

    def sample_tokens(self, grammar_output: Any) -> Any:
        step = self.step
        if grammar_output is not None or not self._fits_tail(step):
            return super().sample_tokens(grammar_output)
        # The batch stays as vLLM has prepared it: all that follows reads its rows on the device.
        step.has_tail = True
        step.trees = step.whole_trees = self._shape.trees(step)
        with patches.swapped(self, "speculator", None):
            output = super().sample_tokens(None)
        if output is not None:  # else the model has failed
            self._copied = output.copy_event
            width = width_of(step.trees.forest)
            output.sampled_token_ids = output.sampled_token_ids[:, :width]
        return output

    # ---- vLLM's preparations ---------------------------------------------------------------------

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: Any,
        batch_desc: Any,
        *args: Any,
        **kwargs: Any,
    ) -> InputBatch:
        batch: InputBatch = super().prepare_inputs(
            scheduler_output, batch_req_state, batch_desc, *args, **kwargs
        )
        # vLLM builds metadata for this bound. Only graphs for drafts have one.
        batch.max_query_len = batch_desc.max_query_len
        return batch

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        self._choose_buffers(None if self.step.is_prepared_early else input_batch)
        return super().prepare_attn(input_batch)

    def prepare_dummy_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        self._choose_buffers(input_batch)
        if self.dummies_have_drafts:
            self._starts = self._starts_of_dummies(input_batch)
        tables, slots = super().prepare_dummy_attn(input_batch, *args, **kwargs)
        if self.dummies_have_drafts:
            self._lay_out_dummies(input_batch, tables)
        return tables, slots

    def _starts_of_dummies(self, batch: InputBatch) -> Int32s:
        """The first row of each request of the dummy step, and of the padding."""
        ends = np.cumsum(self._dummy_step.forest.sizes + 1)
        starts = np.full(batch.num_reqs_after_padding + 1, ends[-1], np.int32)
        starts[: len(ends) + 1] = [0, *ends]
        return starts

    def _lay_out_dummies(self, batch: InputBatch, tables: tuple[torch.Tensor, ...]) -> None:
        """Replace the requests with which vLLM has filled a graph by those of the dummy step."""
        lengths = (self._dummy_step.forest.sizes + 1).astype(np.int32)
        count, num_tokens = len(lengths), int(lengths.sum())
        starts = batch.query_start_loc_np = self._starts
        batch.query_start_loc.copy_(torch.from_numpy(starts))
        seq_lens = torch.from_numpy(np.diff(starts))
        batch.seq_lens.copy_(seq_lens)
        batch.seq_lens_cpu_upper_bound = seq_lens
        batch.num_reqs, batch.num_tokens, batch.num_scheduled_tokens = count, num_tokens, lengths
        batch.logits_indices = batch.query_start_loc[1 : count + 1] - 1
        without_padding = replace(
            batch,
            query_start_loc_np=starts[: count + 1],
            seq_lens=batch.seq_lens[:count],
            seq_lens_cpu_upper_bound=seq_lens[:count],
            positions=batch.positions[:num_tokens],
            max_query_len=None,
        )
        set_dummy_context(
            without_padding,
            self.block_tables,
            int(self._dummy_step.contexts[0]),
            self.kv_cache_config.num_blocks,
            self.max_model_len,
            input_block_tables=tables,
        )

    def _choose_buffers(self, batch: InputBatch | None) -> None:
        """The graph that runs this batch; None if it is chosen at the model call."""
        graph = None
        if batch is not None and batch.max_query_len is not None:
            graph = self._buffers.get(batch.num_tokens_after_padding)
        self.attended.graph = graph
        self._starts = NO_STARTS if batch is None else batch.query_start_loc_np

    def _attend(self, step: PlacedTrees) -> None:
        super()._attend(step)
        attended = self.attended
        if attended.graph is not None:
            attended.graph.trees.fill(attended.trees, self._starts)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        # An idle rank runs one token in the steps of the others, as in plain vLLM.
        with patches.swapped(self, "decode_query_len", 1):
            return super()._dummy_run(*args, **kwargs)
