"""vLLM's first model runner with draft trees: recall, place, verify, compact, propose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.worker import gpu_model_runner

from lookahead_vllm.draft.budget.cost import Load, StepWork
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine import messages, patches, step_report
from lookahead_vllm.engine.worker import branching, recurrent
from lookahead_vllm.engine.worker.attended import AttendedTrees
from lookahead_vllm.engine.worker.attention import TreeAttention
from lookahead_vllm.engine.worker.branching import NOTHING_BRANCHES
from lookahead_vllm.engine.worker.draft_step import NO_DRAFTS, DraftStep, split_rows
from lookahead_vllm.engine.worker.drafter import LiveRequest, LookaheadDrafter, prompt_tokens
from lookahead_vllm.engine.worker.step_clock import StepClock
from lookahead_vllm.engine.worker.step_cost import begin_to_draft
from lookahead_vllm.engine.worker.v1.forward_passes import RunnerPasses
from lookahead_vllm.engine.worker.v1.node_rows import NodeRows
from lookahead_vllm.engine.worker.v1.recurrent import RecurrentRows, commit
from lookahead_vllm.engine.worker.v1.sampler import (
    Draws,
    NodeProcessors,
    NodeThinking,
    generator_states_for,
    keep_all_processors,
    merged_logprobs,
    node_metadata,
    spread_metadata,
    tokens_of,
)
from lookahead_vllm.verify.acceptance import accepted_paths, emitted_tokens
from lookahead_vllm.verify.recurrence import StateMover
from lookahead_vllm.verify.seeded_draws import GeneratorStates

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Base
else:
    _Base = object


class SynchronousRunner(_Base):
    """Mixin for vLLM's V1 model runner, which serves CPUs; list it first among the base classes."""

    attention: TreeAttention
    drafter: LookaheadDrafter
    speculative_config: SpeculativeConfig | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original = gpu_model_runner.build_logitsprocs
        replacement = keep_all_processors(original)
        with patches.swapped(gpu_model_runner, "build_logitsprocs", replacement):
            super().__init__(*args, **kwargs)
        self._node_processors = NodeProcessors(
            self.vllm_config,
            self.device,
            tuple(self.model_config.logits_processors or ()),
            original,
        )
        self._step = NO_DRAFTS
        """The drafts of the current step."""
        self._work: StepWork | None = None
        """The work of the current step; None if it reads a prompt."""
        self._verified: Verified | None = None
        """The model's choices in the current step, until they are passed to the proposer."""
        self._branching = NOTHING_BRANCHES
        self._attended = AttendedTrees()
        self._recurrent = RecurrentRows() if self.model_config.is_hybrid else None
        """Set if the model has recurrent layers."""
        self._clock = StepClock(overlaps=False)
        """Ticks when a step ends."""
        self._started: set[str] = set()
        """The requests that start in the current step."""
        self._could_draft = False
        """Whether a request of the current step could have a draft."""

    # ---- what may branch -------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if (thinking := self.input_batch.thinking_budget_state_holder) is not None:
            thinking.in_spec_mode = False  # a root is sampled as without speculation
        groups = list(self._attn_group_iterator())
        if self._recurrent is not None:
            layers = self.compilation_config.static_forward_context
            recurrent.start(groups, layers, self.device, self.num_spec_tokens)
        for group in groups:
            group.get_metadata_builder().attended = self._attended
        cache_groups = self.kv_cache_config.kv_cache_groups
        self._branching = branching.decide(self.vllm_config, groups, cache_groups, self.attention)
        self.drafter.use(self._branching)

    def calculate_reorder_batch_threshold(self) -> None:
        super().calculate_reorder_batch_threshold()
        if self._recurrent is not None:
            # Recurrent layers expect rows with drafts before all prompts, but vLLM uses the
            # smallest threshold of all layers.
            self.reorder_batch_threshold = 1 + self.num_spec_tokens

    def warm_up_drafting(self) -> None:
        """Measure the cost of a step on this device, and begin to draft."""
        begin_to_draft(self)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)

    def forward_passes(self) -> RunnerPasses:
        """Passes to measure the cost of a step with."""
        return RunnerPasses(self)

    def schedule_dummy_trees(self, trees: Sequence[DraftTree], context: int = 0) -> None:
        """Give the next dummy runs one request for each tree, with `context` committed tokens."""
        self._step = DraftStep.of_dummies(trees, context)

    # ---- recall and place ------------------------------------------------------------------------

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self._clock.pause(messages.pause_before(scheduler_output))
        self._started = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id in self.requests:
                # The next turn of a session, or the id of a request that ended in the last step.
                self.drafter.finish(request.req_id)
            request.sampling_params = self.drafter.announce(request.req_id, request.sampling_params)
        drafts = messages.to_verify(scheduler_output)
        for request_id, counts in drafts.kept_blocks.items():
            self._keep_first_blocks(request_id, counts)
        if self._recurrent is None:
            return super()._update_states(scheduler_output)
        self._recurrent.remember(self.input_batch, scheduler_output)
        updated = super()._update_states(scheduler_output)
        self._recurrent.restore(self.input_batch, scheduler_output)
        return updated

    def _keep_first_blocks(self, request_id: str, counts: Sequence[int]) -> None:
        """Keep so many blocks of each KV cache group: the scheduler freed the others."""
        for block_ids, count in zip(self.requests[request_id].block_ids, counts, strict=True):
            del block_ids[count:]
        row = self.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            tables = self.input_batch.block_table.block_tables
            for table, count in zip(tables, counts, strict=True):
                table.num_blocks_per_row[row] = count

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        with self._resumed_as_prompts(scheduler_output):
            super()._may_reorder_batch(scheduler_output)

    def _resumed_as_prompts(
        self, scheduler_output: SchedulerOutput | None = None
    ) -> AbstractContextManager[None]:
        if self._recurrent is None:
            return nullcontext()
        return self._recurrent.resumed_as_prompts(self.input_batch, scheduler_output)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any) -> Any:
        config = self.speculative_config
        if not scheduler_output.scheduled_spec_decode_tokens and not self.model_config.is_hybrid:
            # vLLM's shorter path; it does not support recurrent states.
            self.speculative_config = None
        try:
            with self._resumed_as_prompts(scheduler_output):
                prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = config
        self._step = step = self._recall(scheduler_output, num_scheduled_tokens)
        computed = self.input_batch.num_computed_tokens_cpu[: len(num_scheduled_tokens)]
        self._work = step.work(num_scheduled_tokens, computed)
        if step.branches:
            self._place(step)
        return prepared

    def _place(self, step: DraftStep) -> None:
        """Set the nodes' positions. KV slots follow list order and do not change."""
        ends = torch.from_numpy(np.stack(step.node_positions()))
        nodes, positions = ends.to(self.positions.device)
        if self.uses_mrope:
            self._shift_mrope(nodes, positions - self.positions[nodes])
        self.positions[nodes] = positions

    def _shift_mrope(self, nodes: torch.Tensor, shifts: torch.Tensor) -> None:
        """Shift the nodes' M-RoPE positions, which are one range in all dimensions of an answer."""
        self.mrope_positions.gpu[:, nodes] += shifts

    def _recall(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> DraftStep:
        """The drafts of this step."""
        drafts, batch = messages.to_verify(scheduler_output), self.input_batch
        with_singles = self._branching.of_singles
        if not drafts.req_ids and not (with_singles and (num_scheduled_tokens == 1).all()):
            return NO_DRAFTS
        rows = np.array([batch.req_id_to_index[req_id] for req_id in drafts.req_ids], np.int64)
        computed = batch.num_computed_tokens_cpu
        step = DraftStep.of_scheduled(drafts, rows, num_scheduled_tokens, computed)
        if with_singles:
            step.add_singles(num_scheduled_tokens, computed)
        return step

    def _build_attention_metadata(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        found, attended = self._branching, self._attended
        attended.trees = self._step.trees(found.of_chains, found.of_singles)
        try:
            with self._resumed_as_prompts():
                built = super()._build_attention_metadata(num_tokens, *args, **kwargs)
        finally:
            attended.trees = None
        if self._recurrent is not None:
            self._recurrent.end_step()
            if self._step.branches or self.attention.replaces_recurrent_chains:
                starts = self.query_start_loc.np[: self.input_batch.num_reqs + 1]
                parents = recurrent.row_parents(self._step, starts)
                recurrent.set_parents(built[0], torch.from_numpy(parents).to(self.device))
        return built

    # ---- verify ----------------------------------------------------------------------------------

    def _sample(
        self, logits: torch.Tensor, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        step, self._step = self._step, NO_DRAFTS
        num_nodes = np.zeros(self.input_batch.num_reqs, np.int64)
        if spec_decode_metadata is not None and step.forest.num_nodes:
            num_nodes[:] = spec_decode_metadata.num_draft_tokens
        discarded = self._generators_of_unfinished_prefills()
        before = {row: generator.get_state() for row, generator in discarded.items()}
        try:
            return self._verify(logits, num_nodes, step)
        finally:
            for row, state in before.items():
                discarded[row].set_state(state)

    def _verify(self, logits: torch.Tensor, num_nodes: Int64s, step: DraftStep) -> SamplerOutput:
        """Sample at all roots and nodes, accept what matches, and move its KV.

        `logits` has a row for the root and for each of the `num_nodes`, int64 [r], of each request.
        """
        recorder = self.drafter.recorder
        self._count_budget(step.forest)
        if not num_nodes.any():
            if self.drafter.proposer.wants_roots:
                self._verified = self._collect_choices(logits, num_nodes, NO_DRAFTS)
            return super()._sample(logits, None)
        with recorder.timed("verify"):
            self._verified = verified = self._collect_choices(logits, num_nodes, step)
            output, paths = self._sample_trees(logits, num_nodes, step)
        with recorder.timed("compaction"):
            self._move_accepted(step, paths)
        recorder.count_drafts(step.forest, paths)
        if verified is not None:
            step.mark_accepted(verified, paths)
        return output

    def _count_budget(self, forest: DraftForest) -> None:
        if self._could_draft or forest.num_nodes:
            self.drafter.recorder.report.budgets.append(forest.num_nodes)

    def _collect_choices(
        self, logits: torch.Tensor, num_nodes: Int64s, step: DraftStep
    ) -> Verified | None:
        """The model's choices that the proposer needs; None if it needs none."""
        drafter = self.drafter
        if not (num_choices := drafter.proposer.num_choices):
            return None
        with_roots_of = drafter.drafted_for if drafter.proposer.wants_roots else ()
        req_ids = self.input_batch.req_ids
        return step.collect_choices(logits, num_nodes, req_ids, num_choices, with_roots_of)

    def _sample_trees(
        self, logits: torch.Tensor, num_nodes: Int64s, step: DraftStep
    ) -> tuple[SamplerOutput, Int32s]:
        """Sample, then match; also returns the accepted nodes, int32 [t, longest path]."""
        forest, rows = step.forest, step.rows
        draws = self._draw(logits, num_nodes, step)
        at_roots, at_nodes = tokens_of(draws.at_roots), tokens_of(draws.at_nodes)
        paths = accepted_paths(forest, at_roots[rows], at_nodes)
        tokens = emitted_tokens(forest, rows, paths, at_roots, at_nodes)
        draws.advance(rows, paths, tokens, self.model_config.max_model_len)
        logprobs = merged_logprobs(draws.at_roots, draws.at_nodes, forest, rows, paths)
        return SamplerOutput(torch.from_numpy(tokens).to(logits.device), logprobs), paths

    def _draw(self, logits: torch.Tensor, num_nodes: Int64s, step: DraftStep) -> Draws:
        """Sample at every root and node; the arguments are those of `_verify`."""
        roots, node_rows = split_rows(num_nodes)
        requests = [self.requests[i] for i in self.input_batch.req_ids]
        metadata = replace(self.input_batch.sampling_metadata, spec_token_ids=None)
        no_generators = not metadata.generators
        if no_generators and self._node_processors.rows_are_alike(metadata, requests):
            owners = np.repeat(np.arange(len(num_nodes)), num_nodes + 1)
            sampled = self.sampler(logits, spread_metadata(metadata, owners)).sampled_token_ids
            at_roots, at_nodes = (
                SamplerOutput(sampled[torch.from_numpy(some).to(logits.device)], None)
                for some in (roots, node_rows)
            )
            return Draws(at_roots, at_nodes)
        nodes = NodeRows(requests, step.forest, step.rows)
        at_roots = self._sample_some(logits, roots, metadata)
        states: dict[int, GeneratorStates] = {}
        if not no_generators:
            states = generator_states_for(
                self.sampler, metadata.generators, nodes, logits.shape[-1]
            )
        holder = metadata.thinking_budget_state_holder
        thinking = None if holder is None else NodeThinking(holder, nodes)
        at_nodes = self._sample_some(
            logits,
            node_rows,
            node_metadata(
                metadata,
                nodes,
                nodes.generators(states),
                self._node_processors.place(nodes),
                thinking,
            ),
        )
        return Draws(at_roots, at_nodes, states, thinking, requests)

    def _sample_some(
        self, logits: torch.Tensor, rows: Int64s, metadata: SamplingMetadata
    ) -> SamplerOutput:
        """Sample these rows of the step's logits."""
        some = torch.from_numpy(rows).to(logits.device)
        return self.sampler(logits[some], metadata)

    def _move_accepted(self, step: DraftStep, paths: Int32s) -> None:
        """Move the accepted nodes' KV to the slots right after the root's, and their states."""
        moves = step.kv_moves(paths)
        if not moves.size:
            return
        self.drafter.recorder.counters.moved_tokens += moves.shape[1]
        origins, targets = torch.from_numpy(moves).to(self.device)
        for mover, table in zip(
            self._branching.movers, self.input_batch.block_table.block_tables, strict=True
        ):
            if isinstance(mover, StateMover):
                commit(mover, step, paths, table.block_table.gpu)
            else:
                slots = table.slot_mapping.gpu
                mover.move(slots[origins], slots[targets])

    def _generators_of_unfinished_prefills(self) -> dict[int, torch.Generator]:
        """By row: generators whose draw in this step vLLM discards."""
        generators = self.input_batch.generators
        if not generators:
            return {}
        discard = self.discard_request_mask.np
        return {row: g for row, g in generators.items() if discard[row]}

    @contextmanager
    def _without_generators(self, rows: dict[int, torch.Generator]) -> Iterator[None]:
        generators = self.input_batch.generators
        for row in rows:
            del generators[row]
        try:
            yield
        finally:
            generators.update(rows)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # `_sample` has restored these generators already.
        with self._without_generators(self._generators_of_unfinished_prefills()):
            return super()._bookkeeping_sync(*args, **kwargs)

    # ---- propose ---------------------------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        batch, drafter = self.input_batch, self.drafter
        with drafter.recorder.timed("draft"):
            emitted: list[tuple[LiveRequest, list[int]]] = []
            lengths: list[int] = []
            plain: list[int] = []
            prefill = prompts = 0
            num_tokens = batch.num_tokens_no_spec[: batch.num_reqs].tolist()
            for row, (request_id, tokens) in enumerate(
                zip(batch.req_ids, sampled_token_ids, strict=True)
            ):
                if not tokens:  # an unfinished prefill
                    computed = int(batch.num_computed_tokens_cpu[row])
                    computed += scheduler_output.num_scheduled_tokens[request_id]
                    prefill += num_tokens[row] - computed
                    prompts += 1
                    continue
                try:
                    live = drafter.live(request_id)
                except KeyError:
                    live = self._follow(request_id)
                if live is None:
                    plain.append(num_tokens[row])
                else:
                    emitted.append((live, tokens))
                    lengths.append(num_tokens[row])
            verified, self._verified = self._verified, None
            drafter.commit(emitted, verified)
            limits = []
            for (live, _), length in zip(emitted, lengths, strict=True):
                if (limit := drafter.limits_of(live, length)) is not None:
                    limits.append(limit)
                else:
                    plain.append(length)
            prefill = min(prefill, self.max_num_tokens)
            load = Load(len(plain), sum(plain), prefill, prompts)
            drafts = drafter.draft(limits, load)
        self._could_draft = bool(limits)
        self._observe_step(scheduler_output)
        return [drafts.get(request_id, []) for request_id in batch.req_ids]

    def _follow(self, request_id: str) -> LiveRequest | None:
        request = self.requests[request_id]
        # Not from the batch: there, a prompt of embeddings leaves an earlier request's tokens.
        prompt = prompt_tokens(request)
        return self.drafter.follow(request_id, prompt, request.sampling_params)  # type: ignore[arg-type]

    def _observe_step(self, scheduler_output: SchedulerOutput) -> None:
        """Measure the time since the end of the last step, unless a new request came between."""
        elapsed = self._clock.tick()
        work, self._work = self._work, None
        if elapsed is not None and not scheduler_output.scheduled_new_reqs:
            self.drafter.observe_step(work, elapsed)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        self._step = NO_DRAFTS
        # vLLM uses one constant for all outputs without requests, so nothing is attached to it.
        if isinstance(output, ModelRunnerOutput) and output.req_ids:
            if (proposed := self.drafter.proposed(output.req_ids)) is not None:
                messages.attach(output, proposed)
            step_report.attach(output, self.drafter.recorder.take_report())
        return output

    def _on_request_state_removed(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        super()._on_request_state_removed(req_id, *args, **kwargs)
        if req_id not in self._started:
            self.drafter.finish(req_id)

    def shutdown(self) -> None:
        self.drafter.shutdown()
        self._branching = NOTHING_BRANCHES  # its movers hold the KV caches
        super().shutdown()
