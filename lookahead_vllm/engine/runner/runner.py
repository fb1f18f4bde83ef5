"""vLLM's Model Runner V2 with draft trees that are grown late: draft, trim, place, verify."""

import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from lookahead_vllm.draft.budget.cost import StepWork
from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.engine import messages, patches
from lookahead_vllm.engine.attention import branching
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees
from lookahead_vllm.engine.attention.branching import NOTHING_BRANCHES
from lookahead_vllm.engine.attention.tree_attention import TreeAttention
from lookahead_vllm.engine.config import options_of
from lookahead_vllm.engine.cost.measure import begin_to_draft
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.drafter.late_drafts import LateDrafts
from lookahead_vllm.engine.grammar.copies import GrammarCopies
from lookahead_vllm.engine.grammar.masks import GrowingMasks
from lookahead_vllm.engine.messages import LateReport
from lookahead_vllm.engine.recurrent import states as recurrent
from lookahead_vllm.engine.recurrent.states import RequestStates
from lookahead_vllm.engine.runner import model_states
from lookahead_vllm.engine.runner.dummy_runs import DummyRuns
from lookahead_vllm.engine.runner.forward_passes import RunnerPasses
from lookahead_vllm.engine.runner.speculator import LateSpeculator, without_dense_texts
from lookahead_vllm.engine.runner.stages import ComputedTrees
from lookahead_vllm.engine.runner.trained_drafter import TrainedDrafter, make_speculator
from lookahead_vllm.engine.step.drafts import NO_TREES, Drafts
from lookahead_vllm.engine.step.late_shape import LateMetadata, LateShape
from lookahead_vllm.engine.step.placed_trees import NO_DRAFTS, PlacedTrees
from lookahead_vllm.engine.step.sampler import NodeSampler, RootSampler
from lookahead_vllm.engine.step.slots import filled, write_lengths, write_tokens
from lookahead_vllm.engine.step.step import State, Step
from lookahead_vllm.verify.choices import Choices, pack_choices
from lookahead_vllm.verify.layout.node_layout import NodeLayout, rows_of_nodes
from lookahead_vllm.verify.transfer import to_device
from lookahead_vllm.verify.walk import Walk

_TREES = "lookahead_trees"
"""Attribute of what a pipeline stage awaits from the last one: the `ComputedTrees` of that step."""


def _no_slots(*_: Any, **__: Any) -> None:
    """In the place of `BlockTables.compute_slot_mappings`."""


class LookaheadRunner(DummyRuns):
    """Mixin for vLLM's V2 model runners; list it first among the base classes.

    vLLM calls the stations of a step in this order. What they find out is kept in `step`.

    1. `finish_requests`, `add_requests`, `update_requests`: requests end and begin.
    2. `gather_batch_req_state`: a step that only decodes is left as it is, for vLLM to prepare with
       all its slots (`_begin`). Any other step waits for the tokens of the step before; it goes on
       with a copy that has only the slots in use (`_fill_slots`).
    3. `prepare_inputs`, `prepare_attn`: the nodes get their places (`_place`), and attention gets
       the trees (`_attend`).
    4. The model call, `_forward`, or in a graph `GraphRunner._choose_graph`: a step that is
       prepared for all its slots waits and drafts only here, and one kernel writes its rows.
    5. `sample_tokens`: after the launch, the shapes of such a step are made exact (`_settle`).
    6. The sampler samples at all nodes, walks, and moves the KV of accepted nodes (`NodeSampler`);
       after a captured step, a second graph may do so (`GraphRunner.sample`).
    7. `sample_tokens`: the output is kept for the next step's drafts (`LateDrafts.add_step`).
    """

    attention: TreeAttention
    """Tree attention on this device."""
    sizes_steps = False
    """Whether preparing a step takes time in which the device could compute the one before."""
    _branching = NOTHING_BRANCHES
    execute_model_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.step = Step(SchedulerOutput.make_empty())
        """This step, until the next one begins."""
        self.attended = AttendedTrees()
        """What attention computes in the next forward pass, of a step or a dummy run."""
        sparse_states = partial(without_dense_texts, model_runner.RequestState)
        with (
            patches.swapped(model_runner, "init_speculator", self._make_speculator),
            patches.swapped(model_runner, "RequestState", sparse_states),
        ):
            super().__init__(*args, **kwargs)
        self.drafter = LookaheadDrafter(self.vllm_config)
        self._grammars = GrammarCopies(self.vllm_config)
        self._late = LateDrafts(self.drafter, self._grammars)
        self._shape: LateShape
        """Writes the rows of steps that are prepared before their drafts are known."""
        self._has_windows = False
        """Whether layers let go of blocks that have left their windows."""
        self._num_logits: Int32s | None = None
        """The rows of logits of each request, until the step's adapters are set."""
        self._clock = time.perf_counter
        self._launched: float | None = None
        """When the last step was launched."""
        self._builders: list[Any] = []
        """The builders of attention metadata."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with (
            patches.swapped(model_runner, "Sampler", partial(RootSampler, self._observe)),
            patches.swapped(model_runner, "RejectionSampler", self._make_node_sampler),
            patches.swapped(model_runner, "StructuredOutputsWorker", GrowingMasks),
        ):
            super().load_model(*args, **kwargs)
        state = self.model_state
        if getattr(state, "rope_state", None) is not None:
            model_states.add_depths(state, self._this_step)
        if self.model_config.is_hybrid:
            with_chains = self.attention.replaces_recurrent_chains
            model_states.add_parents(state, self.attended, with_chains)
        elif self.trained is None:
            model_states.wait_for_drafts(state, self._this_step)
        is_eager = self.compilation_config.mode == CompilationMode.NONE
        if self.sizes_steps and not is_eager:  # else its forward is compiled, with what wraps it
            self.sizes_steps = type(self.model).__call__ is torch.nn.Module.__call__
        if is_eager or self.sizes_steps:
            self.model.forward = partial(self._forward, self.model.forward)

    def _this_step(self) -> Step:
        return self.step

    def _make_speculator(
        self, config: VllmConfig, device: torch.device, states: RequestState
    ) -> Any:
        """What takes the place of vLLM's speculator: none, or a trained drafter's."""
        if options_of(config).drafter is None:
            return LateSpeculator(config, device, states)
        speculator = make_speculator(config, device, states)
        self.trained = TrainedDrafter(self, self._this_step, speculator, states)
        return speculator

    def _make_node_sampler(self, sampler: RootSampler, *args: Any, **kwargs: Any) -> NodeSampler:
        """What takes the place of vLLM's rejection sampler."""
        return NodeSampler(sampler, self._this_step)

    # ---- what may branch -------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        groups = list(chain.from_iterable(self.attn_groups))
        without = () if self.trained is None else self.trained.layers
        self._builders = [group.get_metadata_builder(0) for group in groups]
        for builder in self._builders:
            builder.attended = self.attended
        cache_groups = self.kv_cache_config.kv_cache_groups
        self._has_windows = not all(
            isinstance(group.kv_cache_spec, FullAttentionSpec) for group in cache_groups
        )
        self._branching = branching.decide(
            self.vllm_config, groups, cache_groups, self.attention, without
        )
        self.drafter.use(self._branching)
        self._late.may_skip_wait = not self._branching.of_chains
        if self.model_config.is_hybrid:
            layers = self.compilation_config.static_forward_context
            recurrent.start(groups, layers, self.device, self.num_speculative_steps)
        self._shape = LateShape(self, None if self.trained is None else self.trained.tokens)

    # ---- requests, and the beginning of a step ---------------------------------------------------

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.finished_req_ids:
            self._late.count(wait=False)  # their last tokens have arrived, as they are finished
        super().finish_requests(scheduler_output)
        for req_id in scheduler_output.finished_req_ids:
            self._late.finish(req_id)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._late.start(new)
        if scheduler_output.scheduled_new_reqs:  # else vLLM copies what has not changed
            super().add_requests(scheduler_output)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        num_blocks = self.block_tables.num_blocks.np
        kept_blocks = messages.kept_blocks(scheduler_output)
        for req_id, counts in kept_blocks.items():
            num_blocks[:, self.req_states.req_id_to_index[req_id]] = counts
        super().update_requests(scheduler_output)
        if (
            scheduler_output.scheduled_new_reqs
            or scheduler_output.finished_req_ids
            or scheduler_output.preempted_req_ids
        ):
            self.step.may_repeat = False

    def gather_batch_req_state(self, scheduler_output: SchedulerOutput, dummy_run: bool) -> Any:
        if dummy_run:
            # It uses the buffers of the last step, and must not get its trees.
            self.step = Step(SchedulerOutput.make_empty())
        else:
            step = self._begin(scheduler_output)
            if step.repeats:
                return step.found
            scheduler_output = step.shaped
        # vLLM would put a prompt that has as many tokens as the longest draft before requests
        # without drafts, and recurrent layers take what follows a prompt for prompts.
        with patches.swapped(self, "decode_query_len", 1):
            found = super().gather_batch_req_state(scheduler_output, dummy_run)
        if not dummy_run:
            self.step.found = found
        return found

    def _begin(self, scheduled: SchedulerOutput) -> Step:
        """A step begins: either vLLM prepares it as it is, or its drafts are grown first."""
        last = self.step
        if self.use_pp:
            step = last  # see `draft_for_stages`
        else:
            step = self.step = Step(scheduled, last.work)
        if step.repeat(last):
            new_blocks = scheduled.scheduled_cached_reqs.new_block_ids
            step.has_new_blocks = (
                self._has_windows
                or new_blocks.count(None) < len(new_blocks)
                or bool(messages.kept_blocks(scheduled))
            )
            return step
        if self._shape.can_prepare(scheduled):
            num_reqs, slots = len(scheduled.num_scheduled_tokens), step.num_slots
            most = min(self.most_early_nodes(num_reqs, slots), slots)
            if most or (not slots and self.places_roots(num_reqs)):
                step.prepare_early(most)
                return step
        if step.has_slots and self.may_size(scheduled):
            budget = self.drafter.options.budget
            step.size(last, None if isinstance(budget, str) else budget)
            return step
        step.shaped = self._fill_slots(step)
        return step

    def may_size(self, scheduled: SchedulerOutput) -> bool:
        """Whether vLLM may prepare a step that reads a prompt before its drafts are known."""
        return (
            self.sizes_steps
            and self._shape.is_possible
            and self.trained is None
            # Others may read the host's lengths, which are too large until the tokens have come.
            and self.drafter.may_branch
            and not self.model_config.use_mla
            and not scheduled.has_structured_output_requests
            and self._shape.reads_prompts(scheduled)
        )

    def most_early_nodes(self, num_reqs: int, slots: int) -> int:
        """How many nodes a step that only decodes may get after vLLM has prepared it.

        0 if vLLM would run such a step in pieces.
        """
        return slots if self.compilation_config.mode == CompilationMode.NONE else 0

    def places_roots(self, num_reqs: int) -> bool:
        """Whether the rows of a step without slots, of so many requests that decode, are written
        like those of a step with slots."""
        return False

    def _fill_slots(self, step: Step) -> SchedulerOutput:
        """The scheduler's output with drafts in place of slots."""
        scheduled, states = step.scheduled, self.req_states
        slots = scheduled.scheduled_spec_decode_tokens
        if not slots:
            return scheduled
        rows = torch.tensor([states.req_id_to_index[req_id] for req_id in slots])
        rows = to_device(rows, self.device)
        if not self.use_pp:
            self._draft(step)  # waits for the step before
        drafts = step.drafts
        write_tokens(states, drafts, list(slots), rows)
        write_lengths(states, drafts)
        return filled(scheduled, drafts)

    def draft_for_stages(self, scheduled: SchedulerOutput) -> None:
        """In a pipeline, draft before the step begins.

        The worker of the last stage begins by waiting for the stage before it, which needs the
        drafts.
        """
        if not self.use_pp:
            return
        step = self.step = Step(scheduled, self.step.work)
        if step.has_slots:
            stages = get_pp_group()
            drafts = self._grow(step) if stages.is_last_rank else None
            self._keep_drafts(step, stages.broadcast_object(drafts, src=stages.world_size - 1))

    def update_pp_decode_requests(self) -> None:
        """On the stages before the last one: also move the KV of what has been accepted, and the
        states, which vLLM then copies from where a chain would have left them."""
        handler: Any = self.pp_handler
        pending: Any = handler.queue[0] if handler is not None and handler.queue else None
        if (trees := getattr(pending, _TREES, None)) is not None:
            handler.main_stream.wait_event(pending.event)
            now = handler.req_idx_gen_np[pending.idx_mapping_np]
            trees.move(
                self._branching.movers, pending.sampled_tokens, now != pending.gen_at_receive_np
            )
        super().update_pp_decode_requests()

    # ---- draft -----------------------------------------------------------------------------------

    def _draft(self, step: Step) -> None:
        """Wait for the tokens of the step before, and draft."""
        self._keep_drafts(step, self._grow(step))

    def _grow(self, step: Step) -> Drafts:
        """The drafts of a step, the same on every rank."""
        drafter, drafts = self.drafter, NO_TREES
        if drafter.is_drafting_rank:
            drafts = self._late.grow(step, self._chains_only(step.scheduled))
            drafter.recorder.report.nodes_sent.append(drafts.forest.num_nodes)
        group = get_tp_group()
        if group.world_size > 1:
            drafts = group.broadcast_object(drafts, src=0)
        return drafts

    def _keep_drafts(self, step: Step, drafts: Drafts) -> None:
        """Keep the drafts of a step; a replica keeps its part."""
        step.drafts = step.whole = drafts

    def _chains_only(self, scheduled: SchedulerOutput) -> set[str]:
        """Requests with a custom logits processor, which takes the rows before a row as history."""
        history = self.rejection_sampler.history
        if not history.has_custom:
            return set()
        index = self.req_states.req_id_to_index
        req_ids = list(scheduled.scheduled_spec_decode_tokens)
        needed = history.needs_chain(np.array([index[req_id] for req_id in req_ids]))
        return {req_ids[i] for i in np.flatnonzero(needed).tolist()}

    # ---- place -----------------------------------------------------------------------------------

    def prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        step = self.step
        if step.repeats:
            batch = step.batch = step.prepared
            lengths = self.req_states.num_computed_tokens_np
            batch.num_computed_tokens_np = lengths[batch.idx_mapping_np]
            return batch
        batch = step.batch = step.prepared = super().prepare_inputs(step.shaped, *args, **kwargs)
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
        step = self.step
        if not step.repeats:  # slots follow linear positions
            step.tables, step.slots = super().prepare_attn(input_batch)
        elif step.has_new_blocks:  # the slots follow when the rows are placed
            with patches.swapped(self.block_tables, "compute_slot_mappings", _no_slots):
                step.tables, _ = super().prepare_attn(input_batch)
        if step.state is not State.WAITS:
            self._attend(NO_DRAFTS)
        else:
            if step.whole.forest.num_nodes:
                self._place(step)
            self._attend(step.trees)
            step.elapsed = self._tick()
        return step.tables, step.slots

    def _attend(self, trees: PlacedTrees) -> None:
        """Give attention the trees of the next forward pass, of a step or a dummy run."""
        self.attended.step = trees
        self.attended.trees = trees.trees(self._branching.of_chains)

    def _place(self, step: Step) -> None:
        """Find the drafts' rows of the batch, and set the nodes' positions."""
        self._lay_out(step)
        assert step.layout is not None
        if step.trees.branches:
            step.batch.positions[step.batch.logits_indices] += step.layout.shifts

    def _lay_out(self, step: Step) -> None:
        """Find the drafts' rows of the batch, and of its logits."""
        batch = step.batch
        if step.is_prepared_early:
            trees = self._shape.trees(step)
            step.layout = self._shape.layout(trees.forest)
        else:
            trees = step.drafts.in_batch(batch.req_ids, batch.num_scheduled_tokens)
            starts = batch.cu_num_logits_np
            step.layout = NodeLayout.build(trees.forest, trees.rows, starts, self.device)
        step.trees = step.whole_trees = trees
        if step.state is State.SIZED:
            rows = step.rows[: len(step.whole.req_ids)]
            step.whole_trees = step.whole.placed(rows, batch.query_start_loc_np)
        step.move = partial(self._move, step) if trees.branches else None

    def _move(self, step: Step, path: Walk, requests: slice, starts: torch.Tensor) -> None:
        """Move the accepted nodes' KV to the slots right after the root's, and their states.

        `path` is that of the batch's `requests`, from rows of logits that begin at `starts`.
        """
        tables = self.block_tables.input_block_tables
        for mover, own, table in zip(self._branching.movers, step.slots, tables, strict=True):
            if mover is None:
                continue
            if isinstance(mover, RequestStates):
                mover.commit(mover.places(table, step.batch, requests), path, starts)
            else:
                mover.move_paths(own[path.origins], own[path.targets])

    # ---- at the model call, in a step that vLLM has prepared for all slots -----------------------

    def _forward(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Replaces the model's: a step outside of graphs gets its drafts, and only their rows."""
        step = self.step
        if step.awaits_drafts:
            context = get_forward_context()
            if step.state is State.SIZED:
                self._draft_sized(step)
            else:
                self._draft(step)
                self._shape.share_out(step)
                self._shape.place(step.batch.num_tokens_after_padding)
                inputs |= self._shape.inputs()
                context.is_padding = self._shape.is_padding()
            context.attn_metadata = LateMetadata(partial(self._build_metadata, step))
            step.elapsed = self._tick()
        return forward(*args, **inputs)

    def _draft_sized(self, step: Step) -> None:
        """Draft, and write the nodes to the rows that vLLM has prepared for them."""
        whole, slots = self._grow(step), step.shaped.scheduled_spec_decode_tokens
        step.whole, step.drafts = whole, whole.padded(slots)
        batch, forest = step.batch, step.drafts.forest
        step.rows = step.drafts.rows_in(batch.req_ids)
        roots = batch.query_start_loc_np[step.rows]
        nodes = to_device(rows_of_nodes(forest.arrays, roots), self.device)
        rows, tokens, shifts = nodes.unbind()
        batch.input_ids[rows] = tokens.to(batch.input_ids.dtype)
        if forest.branching.any():
            batch.positions[rows] += shifts

    def _build_metadata(self, step: Step) -> dict[str, Any]:
        """Attention's metadata of a step outside of graphs."""
        self._settle(step)
        if step.is_prepared_early:  # else vLLM has mapped the slots of its rows
            slots = step.slots[:, : step.batch.num_tokens]
            by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
            get_forward_context().slot_mapping = by_layer
        self._attend(step.trees)
        return self._metadata_of(step, CUDAGraphMode.NONE)

    def _metadata_of(self, step: Step, mode: CUDAGraphMode) -> dict[str, Any]:
        batch = step.batch
        metadata: dict[str, Any] = self.model_state.prepare_attn(
            batch,
            mode,
            tuple(table[: batch.num_reqs_after_padding] for table in step.tables),
            step.slots[:, : batch.num_tokens_after_padding],
            self.attn_groups,
            self.kv_cache_config,
        )
        return metadata

    # ---- after the launch ------------------------------------------------------------------------

    def _settle(self, step: Step) -> None:
        """Once the rows of such a step are placed: its batch with exact shapes."""
        if step.state is State.EXACT:
            return
        if step.state is State.SIZED:  # it has them
            if step.layout is None:
                self._lay_out(step)
            return
        assert step.state is State.DRAFTED, "vLLM has run the model in another way"
        self._shape.settle(step)
        if step.drafts.forest.num_nodes:
            self._lay_out(step)

    # ---- sample, keep ----------------------------------------------------------------------------

    def sample(self, *args: Any) -> Any:
        output, *counts = super().sample(*args)
        tokens = output.sampled_token_ids
        if self.use_pp and tokens.shape[1] > 1:  # the other stages expect the longest draft's
            missing = self.decode_query_len - tokens.shape[1]
            output.sampled_token_ids = torch.nn.functional.pad(tokens, (0, missing))
        return output, *counts

    def _observe(self, logits: torch.Tensor, batch: InputBatch) -> None:
        """Called before vLLM's sampler, which writes to the logits."""
        if num_choices := self._num_choices_of(self.step):
            self._collect_choices(pack_choices(logits, num_choices), batch)

    def _num_choices_of(self, step: Step) -> int:
        """How many of the model's choices at each row of a step the proposer needs."""
        # Without waiting, the host does not know the texts before the nodes.
        is_needed = step.has_slots and step.whole.waited
        return self.drafter.proposer.num_choices if is_needed else 0

    def _collect_choices(self, packed: torch.Tensor, batch: InputBatch) -> None:
        """Start to copy the model's choices to the host; `packed` as in `pack_choices`."""
        step = self.step
        starts = self._shape.split.starts if step.is_prepared_early else batch.cu_num_logits_np
        choices = Choices.on_host(packed, wait=False)
        trees = step.whole_trees
        bare = () if len(trees.rows) == len(batch.req_ids) else self._late.drafted_for
        step.verified = trees.verified(choices, starts, batch.req_ids, bare)

    def sample_tokens(self, grammar_output: Any) -> Any:
        step = self.step
        is_late = step.state is not State.WAITS and not step.has_tail
        if is_late and self.execute_model_state is not None:
            self._settle(step)
            self.execute_model_state = self.execute_model_state._replace(input_batch=step.batch)
        # Without steps, vLLM does not overwrite its drafts by -1, which later graphs would embed as
        # padding. Stages of a pipeline send each other drafts, and run no such graphs.
        steps = self.num_speculative_steps if self.use_pp else 0
        with patches.swapped(self, "num_speculative_steps", steps):
            output = super().sample_tokens(grammar_output)
        if not self.is_last_pp_rank and step.trees.branches:
            self._keep_trees(step)
        if not isinstance(output, AsyncOutput) or not self.drafter.is_drafting_rank:
            return output
        late = self._late
        if step.has_slots:
            sizes, pays = step.whole.sizes, step.whole.pays
        else:
            sizes, pays = {}, late.would_pay(step.scheduled.num_scheduled_tokens)
        step.output = output
        step.chains = None if self.trained is None else self.trained.chains
        late.add_step(step)
        recorder = self.drafter.recorder
        if not step.has_slots and late.could_draft(step):
            recorder.report.nodes_sent.append(0)
        self._measure(step)
        report = LateReport(sizes, pays, recorder.take_report())
        messages.attach(output.model_runner_output, report)
        return output

    def _keep_trees(self, step: Step) -> None:
        """On the stages before the last one: keep branching trees until their tokens arrive.

        They are on what vLLM awaits, and read in `update_pp_decode_requests`.
        """
        layout, batch, pending = step.layout, step.batch, self.pp_handler.queue[-1]
        assert layout is not None
        if pending is None:
            return
        requests = slice(batch.num_reqs)
        states = {
            group: mover.places(table, batch, requests)
            for group, (mover, table) in enumerate(
                zip(self._branching.movers, self.block_tables.input_block_tables, strict=True)
            )
            if isinstance(mover, RequestStates)
        }
        setattr(pending, _TREES, ComputedTrees.of(layout, batch, step.slots, states))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if not self.vllm_config.scheduler_config.async_scheduling:
            return None  # vLLM asks after the step
        drafts = self.step.whole
        drafted = np.flatnonzero(drafts.forest.sizes)
        forest = drafts.forest.take(drafted, drafts.forest.sizes[drafted])
        return messages.drafts_of([drafts.req_ids[i] for i in drafted.tolist()], forest)

    # ---- what a step costs, and the end ----------------------------------------------------------

    def warm_up_drafting(self) -> None:
        """Measure the cost of a step on this device, and begin to draft."""
        begin_to_draft(self)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)

    def forward_passes(self) -> RunnerPasses:
        """Passes to measure the cost of a step with."""
        return RunnerPasses(self)

    def _tick(self) -> float | None:
        """A step is launched; returns the seconds since the one before."""
        last, self._launched = self._launched, self._clock()
        return None if last is None else self._launched - last

    def _measure(self, step: Step) -> None:
        """Measure the step before: the time from its launch to this one, which may have waited.

        A step that is followed by the step of a new request is not measured.
        """
        work, batch = step.work_before, step.batch
        if step.elapsed is not None and work and not step.scheduled.scheduled_new_reqs:
            waited = step.has_slots and step.whole.waited
            self.drafter.observe_step(work._replace(waits=waited), step.elapsed)
        num_tokens = batch.num_reqs + step.trees.forest.num_nodes
        if step.is_prepared_early or (not batch.has_prefill and batch.num_tokens == num_tokens):
            trees, contexts = step.trees, self._late.contexts(step)
            step.work = StepWork.of_decodes(trees.forest, trees.contexts, contexts)

    def shutdown(self) -> None:
        try:
            self._late.count()
        finally:  # the device may have failed
            self.drafter.shutdown()
            self._grammars.shutdown()
            self._branching, self._builders = NOTHING_BRANCHES, []  # they hold the KV caches
            super().shutdown()
