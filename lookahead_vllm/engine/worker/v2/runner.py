"""vLLM's second model runner with draft trees that are grown late: draft, trim, place, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.mm import rope

from lookahead_vllm.draft.budget.cost import StepWork
from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine import messages, patches, step_report
from lookahead_vllm.engine.messages import LateReport
from lookahead_vllm.engine.worker import branching, recurrent
from lookahead_vllm.engine.worker.draft_step import NO_DRAFTS, DraftStep
from lookahead_vllm.engine.worker.drafter import LookaheadDrafter
from lookahead_vllm.engine.worker.step_clock import StepClock
from lookahead_vllm.engine.worker.step_cost import CapturedTokens, begin_to_draft
from lookahead_vllm.engine.worker.v2.drafts import NO_TREES, Drafts
from lookahead_vllm.engine.worker.v2.forward_passes import RunnerPasses
from lookahead_vllm.engine.worker.v2.grammar_copies import GrammarCopies
from lookahead_vllm.engine.worker.v2.grammar_masks import GrowingMasks
from lookahead_vllm.engine.worker.v2.late_drafts import LateDrafts
from lookahead_vllm.engine.worker.v2.late_shape import LateMetadata, LateShape
from lookahead_vllm.engine.worker.v2.node_history import NodeHistory
from lookahead_vllm.engine.worker.v2.node_rope import NodeRopeState
from lookahead_vllm.engine.worker.v2.sampler import (
    NodeSampler,
    RootSampler,
    TreeRows,
    max_chunk_rows,
)
from lookahead_vllm.engine.worker.v2.speculator import LateSpeculator
from lookahead_vllm.engine.worker.v2.stages import ComputedTrees
from lookahead_vllm.engine.worker.v2.warm_up import WarmUpDrafts
from lookahead_vllm.verify.node_layout import NodeLayout, compile_layout
from lookahead_vllm.verify.place import Split
from lookahead_vllm.verify.recurrence import StateMover
from lookahead_vllm.verify.transfer import to_device
from lookahead_vllm.verify.walk import Walk

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Base

    from lookahead_vllm.verify.tree_batch import TreeBatch
else:
    _Base = object


_TREES = "lookahead_trees"
"""Attribute of what a pipeline stage awaits from the last one: the `ComputedTrees` of that step."""


class LookaheadRunner(_Base):
    """Mixin for vLLM's V2 model runners; list it first among the base classes.

    A step begins with vLLM's bookkeeping, which needs no tokens. Then there are two ways.

    A step that only decodes is prepared by vLLM for all the slots that the scheduler reserved
    (`gather_batch_req_state`, `prepare_inputs`, `prepare_attn`). At the model call, the drafting
    rank waits for the tokens of the step before and drafts, and the rows that the drafts need are
    written (`_forward`). After the launch, shapes are made exact (`_settle`). See
    `late_shape.py`.

    In any other step, the drafting rank waits at once, fills the slots, and the step goes on with a
    copy of the scheduler's output that has only the slots in use (`_fill_slots`).
    """

    attention: ModuleType
    """Tree attention on this device: `cpu_attention.py` or `gpu_attention.py`."""
    trees_of_chains = False
    """Whether tree attention also verifies chains."""
    dummies_are_tokens = False
    """Whether the model computes the tokens of a dummy run as it computes those of a step."""
    dummies_have_drafts = False
    """Whether a dummy run in a graph has the requests of the dummy step with their contexts."""
    node_sampler = NodeSampler
    """Takes the place of vLLM's rejection sampler."""
    execute_model_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # For an n-gram method, vLLM would keep all texts on the device.
        sparse_states = partial(_without_dense_texts, model_runner.RequestState)
        with (
            patches.swapped(model_runner, "init_speculator", LateSpeculator),
            patches.swapped(model_runner, "RequestState", sparse_states),
        ):
            super().__init__(*args, **kwargs)
        self.drafter = LookaheadDrafter(self.vllm_config)
        self._grammars = GrammarCopies(self.vllm_config)
        self._late = LateDrafts(self.drafter, self._grammars)
        self._shape = LateShape(self)
        """Whether the shape of this step is known before its drafts, and what follows from it."""
        self._scheduled: SchedulerOutput
        """The scheduler's output of this step, with the slots that vLLM prepares."""
        self._drafts: Drafts = NO_TREES
        self._step = NO_DRAFTS
        """The drafts of this step, in the order of the batch."""
        self._dummy_step = NO_DRAFTS
        """The drafts of dummy runs."""
        self._verified: Verified | None = None
        """The model's choices in this step, for proposers that need them."""
        self._num_logits: Int32s | None = None
        """The rows of logits of each request, until the step's adapters are set."""
        self._report: LateReport | None = None
        self._batch: InputBatch
        """The batch of this step."""
        self._work: StepWork | None = None
        """What the time of this step depends on."""
        self._clock = StepClock(overlaps=True)
        """Ticks when a step is launched."""
        self._elapsed: float | None = None
        """Seconds from the launch of the step before to that of this one; None if unknown."""
        self._movers: list[Any] = []
        """One for each KV cache group, where trees may branch."""
        self._builders: list[Any] = []
        """The builders of attention metadata."""
        self._verifies = NO_DRAFTS
        """The drafts in the next forward pass, of a step or a dummy run."""
        self._computed: ComputedTrees | None = None
        """The branching trees of this step, on a pipeline stage before the last one."""
        self._rope: NodeRopeState | None = None
        """Of a model with M-RoPE."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with (
            patches.swapped(model_runner, "Sampler", RootSampler),
            patches.swapped(model_runner, "RejectionSampler", self.node_sampler),
            patches.swapped(rope, "RopeState", NodeRopeState),
            patches.swapped(model_runner, "StructuredOutputsWorker", GrowingMasks),
        ):
            super().load_model(*args, **kwargs)
        self._rope = getattr(self.model_state, "rope_state", None)
        if self.model_config.is_hybrid:
            prepare = self.model_state.prepare_attn
            self.model_state.prepare_attn = partial(self._with_parents, prepare)
        if self.compilation_config.mode == CompilationMode.NONE:
            self.model.forward = partial(self._forward, self.model.forward)
        if self.is_last_pp_rank:  # the others do not sample
            self._history = NodeHistory(self.sampler)
            self.rejection_sampler.history = self._history
            self.sampler.observe = self._observe

    # ---- what may branch -------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        groups = list(chain.from_iterable(self.attn_groups))
        self._builders = [group.get_metadata_builder(0) for group in groups]
        self._movers = branching.decide(self, groups)
        if self.model_config.is_hybrid:
            layers = self.compilation_config.static_forward_context
            recurrent.start(groups, layers, self.device, self.num_speculative_steps)
        self._shape.use_buffers()

    def compile_node_kernels(self) -> None:
        """Compile the kernels that a step with drafts launches around the forward pass."""
        self._shape.warm_up()
        compile_layout()
        if self.is_last_pp_rank:
            self._history.warm_up(self.vocab_size, self.device)

    def warm_up_drafting(self) -> None:
        """Measure the cost of a step on this device."""
        begin_to_draft(self)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """In the block, vLLM's made-up requests get drafts, and nothing is learned from them."""
        drafter = self.drafter
        drafts = WarmUpDrafts(drafter.may_branch, drafter.max_step_nodes)
        masks = self.structured_outputs_worker
        with (
            patches.swapped(self, "_late", drafts),
            patches.swapped(masks, "apply_grammar_bitmask", masks.warm_up)
            if self.is_last_pp_rank
            else nullcontext(),
        ):
            yield

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Sample one row of each request, as vLLM does when it measures the memory that a step
        needs, and allocate the logits of a step with the most nodes."""
        super()._dummy_sampler_run(hidden_states)
        rows = min(len(hidden_states) + self.drafter.max_step_nodes, self.max_num_tokens)
        if self.lora_config is None:
            zeros = hidden_states.new_zeros(rows, hidden_states.shape[1])
            logits = self.model.compute_logits(zeros)
        else:  # adapters are laid out for one row of logits a request
            logits = torch.empty(rows, self.vocab_size, dtype=self.dtype, device=self.device)
        chunk = logits[: max_chunk_rows(self.vocab_size)].float()
        del logits, chunk

    def forward_passes(self) -> RunnerPasses:
        """Passes to measure the cost of a step with."""
        return RunnerPasses(self)

    def without_full_graphs(self) -> AbstractContextManager[Any]:
        """In the block, steps run without CUDA graphs of the whole model."""
        return nullcontext()

    def attends_in_graphs(self) -> bool:
        """Whether dummy runs in such graphs attend to their context."""
        return True

    def captured_tokens(self) -> CapturedTokens:
        """The numbers of tokens for which there are such graphs."""
        return CapturedTokens()

    def schedule_dummy_trees(self, trees: Sequence[DraftTree], context: int = 0) -> None:
        """Give the next dummy runs one request for each tree, with `context` committed tokens."""
        self._dummy_step = DraftStep.of_dummies(trees, context)

    # ---- draft, trim -----------------------------------------------------------------------------

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.finished_req_ids:
            self._late.learn(wait=False)  # their last tokens have arrived, as they are finished
        super().finish_requests(scheduler_output)
        for req_id in scheduler_output.finished_req_ids:
            self._late.finish(req_id)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._late.start(new)
        super().add_requests(scheduler_output)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        num_blocks = self.block_tables.num_blocks.np
        for req_id, counts in messages.to_verify(scheduler_output).kept_blocks.items():
            num_blocks[:, self.req_states.req_id_to_index[req_id]] = counts
        super().update_requests(scheduler_output)

    def gather_batch_req_state(self, scheduler_output: SchedulerOutput, dummy_run: bool) -> Any:
        if not dummy_run:
            self._clock.pause(messages.pause_before(scheduler_output))
            if not self.use_pp:
                self._forget_drafts()
            prepared = self._shape.begin(scheduler_output)
            scheduler_output = prepared or self._fill_slots(scheduler_output)
            self._scheduled = scheduler_output
        # vLLM would put a prompt that has as many tokens as the longest draft before requests
        # without drafts, and recurrent layers take what follows a prompt for prompts.
        with patches.swapped(self, "decode_query_len", 1):
            return super().gather_batch_req_state(scheduler_output, dummy_run)

    def most_late_nodes(self, num_reqs: int, slots: int) -> int:
        """How many nodes a step that only decodes may get after vLLM has prepared it.

        0 if vLLM would run such a step in pieces.
        """
        return slots if self.compilation_config.mode == CompilationMode.NONE else 0

    def _fill_slots(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """The scheduler's output with drafts in place of slots, and without unused slots.

        It is a copy: in the engine's own process, the scheduler still needs the original.
        """
        slots = scheduled.scheduled_spec_decode_tokens
        if not slots:
            return scheduled
        index = self.req_states.req_id_to_index
        rows = to_device(torch.tensor([index[req_id] for req_id in slots]), self.device)
        counts = dict(scheduled.num_scheduled_tokens)
        for req_id, own in slots.items():
            counts[req_id] -= len(own)
        if not self.use_pp:
            self._drafts = self._draft(scheduled)  # waits for the step before
        drafts = self._drafts
        self._report = _report_of(self._all_drafts)
        if sizes := drafts.sizes:
            for req_id, size in sizes.items():
                counts[req_id] += size
            self._write_drafts(drafts, list(slots), rows)
        self._write_lengths(drafts)
        return replace(
            scheduled,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={i: slots[i][:n] for i, n in sizes.items()},
        )

    def draft_for_stages(self, scheduled: SchedulerOutput) -> None:
        """In a pipeline, draft before the step begins.

        The worker of the last stage begins by waiting for the stage before it, which needs the
        drafts.
        """
        if not self.use_pp:
            return
        self._forget_drafts()
        if scheduled.scheduled_spec_decode_tokens:
            stages = get_pp_group()
            drafts = self._draft(scheduled) if stages.is_last_rank else None
            self._drafts = stages.broadcast_object(drafts, src=stages.world_size - 1)

    def update_pp_decode_requests(self) -> None:
        """On the stages before the last one: also move the KV of what has been accepted."""
        handler: Any = self.pp_handler
        pending: Any = handler.queue[0] if handler is not None and handler.queue else None
        super().update_pp_decode_requests()
        if (trees := getattr(pending, _TREES, None)) is not None:
            handler.main_stream.wait_event(pending.event)
            now = handler.req_idx_gen_np[pending.idx_mapping_np]
            trees.move(self._movers, pending.sampled_tokens, now != pending.gen_at_receive_np)

    @property
    def _all_drafts(self) -> Drafts:
        """The drafts of this step, on all ranks that share them."""
        return self._drafts

    @property
    def _all_trees(self) -> DraftStep:
        """The same, in the order of the batch."""
        return self._step

    def _forget_drafts(self) -> None:
        """Forget those of the step before."""
        self._drafts, self._report = NO_TREES, None
        self.drafter.drafted_for.clear()

    def _draft(
        self,
        scheduled: SchedulerOutput,
        most: int | None = None,
        order: Sequence[str] | None = None,
    ) -> Drafts:
        """The drafts of this step, the same on every rank; at most so many nodes in all."""
        drafter, drafts = self.drafter, NO_TREES
        if drafter.is_drafting_rank:
            drafts = self._late.grow(scheduled, self._chains_only(scheduled), most, order)
            drafter.recorder.report.budgets.append(drafts.forest.num_nodes)
        group = get_tp_group()
        if group.world_size > 1:
            drafts = group.broadcast_object(drafts, src=0)
        return drafts

    def _chains_only(self, scheduled: SchedulerOutput) -> set[str]:
        """Requests with a custom logits processor, which takes the rows before a row as history."""
        index = self.req_states.req_id_to_index
        req_ids = list(scheduled.scheduled_spec_decode_tokens)
        needed = self._history.needs_chain(np.array([index[req_id] for req_id in req_ids]))
        return {req_ids[i] for i in np.flatnonzero(needed).tolist()}

    def _write_drafts(self, drafts: Drafts, with_slots: list[str], rows: torch.Tensor) -> None:
        """Copy the nodes' tokens to vLLM's table, from which it reads the step's input.

        `rows` int64 [s] of the table belong to the requests `with_slots`.
        """
        forest = drafts.forest
        place = {req_id: i for i, req_id in enumerate(with_slots)}
        own = np.array([place.get(req_id, -1) for req_id in drafts.req_ids])  # -1: without nodes
        tokens = np.zeros((len(with_slots), int(forest.sizes.max())), np.int64)
        tokens[own[forest.owners], forest.places] = forest.tokens
        table = self.req_states.draft_tokens
        table[rows, : tokens.shape[1]] = to_device(tokens, table.device).to(table.dtype)

    def _write_lengths(self, drafts: Drafts) -> None:
        """Correct vLLM's lengths on the host, which count the slots of the step before as tokens.

        Attention that computes the rows of a draft as a prompt reads the context's length there.
        """
        index = self.req_states.req_id_to_index
        rows = np.array([index[req_id] for req_id in drafts.req_ids], np.int64)
        is_known = drafts.num_tokens > 0
        self.req_states.num_computed_tokens_np[rows[is_known]] = drafts.num_tokens[is_known] - 1

    # ---- place -----------------------------------------------------------------------------------

    def prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        batch = self._batch = super().prepare_inputs(self._scheduled, *args, **kwargs)
        self._num_logits = np.diff(batch.cu_num_logits_np)
        return batch

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any
    ) -> None:
        """Give each row of logits its request's adapter; vLLM's V2 gives each request one row."""
        num_logits, self._num_logits = self._num_logits, None
        if num_logits is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, num_logits).tolist())
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        tables, slots = super().prepare_attn(input_batch)  # slots follow linear positions
        shape = self._shape
        shape.batch, shape.tables, shape.slots = input_batch, tables, slots
        if shape.is_open:
            self._set_trees(NO_DRAFTS)
            return tables, slots
        self._step, rows = self._place(input_batch, slots)
        if self.is_last_pp_rank:
            self.rejection_sampler.rows = rows
        elif rows is not None and self._step.branches:
            self._computed = ComputedTrees.of(rows.layout, input_batch, slots)
        self._set_trees(self._step)
        self._elapsed = self._clock.tick()
        return tables, slots

    def prepare_dummy_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        self._set_trees(self._dummy_step)
        if self.dummies_are_tokens:
            input_batch.is_padding.fill_(False)
        return super().prepare_dummy_attn(input_batch, *args, **kwargs)

    def _set_trees(self, step: DraftStep) -> None:
        """Give the layers the trees of the next forward pass."""
        self._verifies = step
        self._give_trees(step.trees(self.trees_of_chains))

    def _give_trees(self, trees: TreeBatch | None) -> None:
        """Give the builders of attention metadata what tree attention computes."""
        for builder in self._builders:
            builder.trees = trees

    def _with_parents(
        self, prepare: Callable[..., dict[str, Any]], batch: InputBatch, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Replaces the `prepare_attn` of a model with recurrent layers: they get the trees, too."""
        metadata = prepare(batch, *args, **kwargs)
        step = self._verifies
        if step.branches or self.attention.replaces_recurrent_chains():
            parents = recurrent.row_parents(step, batch.query_start_loc_np)
            recurrent.set_parents(metadata, to_device(parents, self.device))
        return metadata

    def _place(self, batch: InputBatch, slots: torch.Tensor) -> tuple[DraftStep, TreeRows | None]:
        """The drafts in the order of the batch; sets the nodes' positions."""
        if not self._drafts.forest.num_nodes:
            return NO_DRAFTS, None
        step = self._drafts.in_batch(batch.req_ids, batch.num_scheduled_tokens)
        rows = self._lay_out(step, batch, slots)
        if step.branches:
            layout, indices = rows.layout, batch.logits_indices
            placed = batch.positions[indices[layout.roots.long()]] + layout.depths
            if self._rope is not None:
                self._rope.shifts = indices, placed - batch.positions[indices]
            batch.positions[indices] = placed
        return step, rows

    def _lay_out(self, step: DraftStep, batch: InputBatch, slots: torch.Tensor) -> TreeRows:
        """What follows the forward pass of a step with drafts."""
        layout = NodeLayout.build(step.forest, step.rows, batch.cu_num_logits_np, self.device)
        return TreeRows(layout, partial(self._move, slots) if step.branches else None)

    def _move(self, slots: torch.Tensor, path: Walk, requests: slice, ends: torch.Tensor) -> None:
        """Move the accepted nodes' KV to the slots right after the root's, and their states.

        `path` is that of the batch's `requests`, from rows of logits that end at `ends`.
        """
        tables = self.block_tables.input_block_tables
        for mover, own, table in zip(self._movers, slots, tables, strict=True):
            if isinstance(mover, StateMover):
                mover.commit(table[requests], path.places(ends), path.num_sampled)
            else:
                mover.move_paths(own[path.origins], own[path.targets])

    # ---- at the model call, in a step that vLLM has prepared for all slots -----------------------

    def _forward(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Replaces the model's: a step outside of graphs gets its drafts, and only their rows."""
        shape = self._shape
        if shape.awaits_drafts:
            self._draft_late()
            shape.place(shape.batch.num_tokens_after_padding)
            inputs |= shape.inputs()
            context = get_forward_context()
            context.is_padding = shape.is_padding()
            context.attn_metadata = LateMetadata(self._build_metadata)
            self._elapsed = self._clock.tick()
        return forward(*args, **inputs)

    def _draft_late(self) -> Split:
        """Wait for the tokens of the step before, and draft; returns the rows of this step."""
        shape = self._shape
        req_ids = shape.batch.req_ids
        drafts = self._drafts = self._draft(shape.scheduled, shape.most_nodes, req_ids)
        return shape.split(drafts)

    def _build_metadata(self) -> dict[str, Any]:
        """Attention's metadata of a step outside of graphs."""
        self._settle()
        slots = self._shape.slots[:, : self._batch.num_tokens]
        by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        get_forward_context().slot_mapping = by_layer
        self._set_trees(self._step)
        return self._metadata_of(self._batch, CUDAGraphMode.NONE)

    def _metadata_of(self, batch: InputBatch, mode: CUDAGraphMode) -> dict[str, Any]:
        shape = self._shape
        metadata: dict[str, Any] = self.model_state.prepare_attn(
            batch,
            mode,
            tuple(table[: batch.num_reqs_after_padding] for table in shape.tables),
            shape.slots[:, : batch.num_tokens_after_padding],
            self.attn_groups,
            self.kv_cache_config,
        )
        return metadata

    # ---- after the launch ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Once the rows of such a step are placed: its batch with exact shapes, and its report."""
        shape = self._shape
        if shape.is_settled:
            return
        assert not shape.awaits_drafts, "vLLM has run the model in another way"
        batch = self._batch = shape.exact_batch(self._drafts)
        self._report = _report_of(self._drafts)
        self._step, self.rejection_sampler.rows = NO_DRAFTS, None
        if self._drafts.forest.num_nodes:
            self._step = self._drafts.in_batch(batch.req_ids, batch.num_scheduled_tokens)
            self.rejection_sampler.rows = self._lay_out(self._step, batch, shape.slots)

    def sample(self, *args: Any) -> Any:
        output, *counts = super().sample(*args)
        tokens = output.sampled_token_ids
        if self.use_pp and tokens.shape[1] > 1:  # the other stages expect the longest draft's
            missing = self.decode_query_len - tokens.shape[1]
            output.sampled_token_ids = torch.nn.functional.pad(tokens, (0, missing))
        return output, *counts

    def _observe(self, logits: torch.Tensor, batch: InputBatch) -> None:
        """Start to copy the model's choices to the host, for proposers that need them."""
        drafter, step = self.drafter, self._step
        num_choices = drafter.proposer.num_choices
        with_roots_of = drafter.drafted_for if drafter.proposer.wants_roots else ()
        if not num_choices or not (step.forest.num_nodes or with_roots_of):
            return
        sizes = np.diff(batch.cu_num_logits_np) - 1
        self._verified = step.collect_choices(
            logits,
            sizes.astype(np.int64),
            batch.req_ids,
            num_choices,
            with_roots_of,
            wait=False,
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._verified = None
        if self._shape.is_open and self.execute_model_state is not None:
            self._settle()
            self.execute_model_state = self.execute_model_state._replace(input_batch=self._batch)
        output = super().sample_tokens(grammar_output)
        computed, self._computed = self._computed, None
        if computed is not None and (pending := self.pp_handler.queue[-1]) is not None:
            setattr(pending, _TREES, computed)
        if not isinstance(output, AsyncOutput) or not self.drafter.is_drafting_rank:
            return output
        late = self._late
        self._measure(waited=self._report is not None)
        if self._report is None:
            scheduled = self._scheduled.num_scheduled_tokens
            self._report = LateReport({}, late.would_pay(scheduled))
            if late.could_draft(scheduled):
                self.drafter.recorder.report.budgets.append(0)
        late.add_step(output, self._all_trees, self._verified)
        messages.attach(output.model_runner_output, self._report)
        step_report.attach(output.model_runner_output, self.drafter.recorder.take_report())
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts = self._all_drafts
        drafted = np.flatnonzero(drafts.forest.sizes)
        forest = drafts.forest.take(drafted, drafts.forest.sizes[drafted])
        return messages.drafts_of([drafts.req_ids[i] for i in drafted.tolist()], forest)

    def _measure(self, waited: bool) -> None:
        """Measure the last step: the time from its launch to this one, which `waited` for drafts.

        A step that is followed by the step of a new request is not measured.
        """
        elapsed, work, self._work = self._elapsed, self._work, None
        drafter, batch = self.drafter, self._batch
        if elapsed is not None and work is not None and not self._scheduled.scheduled_new_reqs:
            drafter.observe_step(work._replace(waits=waited), elapsed)
        if not batch.has_prefill:
            computed = self._late.num_computed(batch.req_ids)
            self._work = self._step.work(batch.num_scheduled_tokens, computed)

    def shutdown(self) -> None:
        try:
            self._late.learn()
        finally:  # the device may have failed
            self.drafter.shutdown()
            self._grammars.shutdown()
            self._movers, self._builders = [], []  # they hold the KV caches
            super().shutdown()


def _report_of(drafts: Drafts) -> LateReport:
    return LateReport(drafts.sizes, drafts.pays)


def _without_dense_texts(request_state: type, *args: Any, **kwargs: Any) -> Any:
    return request_state(*args, **{**kwargs, "use_dense_all_token_ids": False})
