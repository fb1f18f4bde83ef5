"""The model runner's side of a draft tree's life: recall, place, verify, compact, propose."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.worker import gpu_model_runner

from lookahead_vllm.draft import sources
from lookahead_vllm.draft.budget.cost import Load, StepWork
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.draft.tree import UNKNOWN, DraftForest, DraftTree
from lookahead_vllm.engine import messages, step_report
from lookahead_vllm.engine.step_report import StepReport, TrieGauges
from lookahead_vllm.engine.worker import profile
from lookahead_vllm.engine.worker.drafter import LiveRequest, LookaheadDrafter
from lookahead_vllm.engine.worker.step_cost import step_cost
from lookahead_vllm.engine.worker.v1.positional_draws import SeededSampler
from lookahead_vllm.engine.worker.v1.sampler import (
    NodeProcessors,
    NodeRows,
    NodeThinking,
    generator_states_for,
    keep_all_processors,
    merge_outputs,
    node_metadata,
    spread_metadata,
    without_speculation,
)
from lookahead_vllm.verify.acceptance import accepted_paths
from lookahead_vllm.verify.choices import likeliest
from lookahead_vllm.verify.seeded_draws import GeneratorStates
from lookahead_vllm.verify.tree_batch import TreeBatch

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Base
else:
    _Base = object

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Scheduled:
    """The drafts that are being verified in this step, in the order of the batch."""

    forest: DraftForest
    rows: Int64s
    """int64 [t]: the row of the batch of each tree's request."""
    starts: Int64s
    """int64 [t]: index of each root in the step's flattened tokens; the nodes follow."""
    contexts: Int64s
    """int64 [t]: committed tokens before the root, which is the root's position."""
    from_proposer: NDArray[np.bool_]
    """bool [t]: the trees that are the proposer's, and not a grammar's or what is left of them."""


_NOTHING: Int64s = np.empty(0, np.int64)
_NO_DRAFTS = Scheduled(DraftForest.of([]), _NOTHING, _NOTHING, _NOTHING, np.empty(0, np.bool_))


class LookaheadRunner(_Base):
    """Mixed into one of vLLM's V1 model runners, in front of it."""

    attention: ModuleType
    """What tree attention is on this device: `attention.py` or `gpu_attention.py`."""
    drafter: LookaheadDrafter
    speculative_config: SpeculativeConfig | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original = gpu_model_runner.build_logitsprocs
        gpu_model_runner.build_logitsprocs = keep_all_processors(original)
        try:
            super().__init__(*args, **kwargs)
        finally:
            gpu_model_runner.build_logitsprocs = original
        self._draws: SeededSampler | None = None
        """Where plain vLLM would draw by position; else by generators."""
        if without_speculation(self.vllm_config).use_v2_model_runner:
            self._draws = SeededSampler(self.sampler.topk_topp_sampler)
            self.sampler.topk_topp_sampler = self._draws
        self._logits_indices: torch.Tensor | None = None
        """int64 [rows of logits]: the token of the step that each one follows."""
        self._node_processors = NodeProcessors(
            self.vllm_config,
            self.device,
            tuple(self.model_config.logits_processors or ()),
            original,
        )
        self._scheduled = _NO_DRAFTS
        """The drafts of the step under way."""
        self._work: StepWork | None = None
        """What that step does; None if it reads a prompt."""
        self._verified: Verified | None = None
        """What the model said in that step, until the proposer hears of it."""
        self._movers: list[Any] = []
        """One for each KV cache group, where trees may branch."""
        self._last_step_end: float | None = None
        self.report = StepReport()
        """Of the step under way; sent with its output."""
        self._wanted = False
        """Whether a request of the step under way could have a draft."""
        self._watch = TrieGauges(self.drafter)

    # ---- what may branch -------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if (thinking := self.input_batch.thinking_budget_state_holder) is not None:
            thinking.in_spec_mode = False  # a root is sampled as without speculation
        obstacle = self._branching_obstacle()
        self.drafter.may_branch = obstacle is None
        if obstacle:
            logger.info_once("Lookahead verifies chains, not trees, here: %s.", obstacle)
            return
        self._movers = []
        layers = self.compilation_config.static_forward_context
        for group in self.kv_cache_config.kv_cache_groups:
            # Layers that share their KV with an earlier one hold the same tensor.
            caches = {c.data_ptr(): c for c in (layers[n].kv_cache for n in group.layer_names)}
            first = layers[group.layer_names[0]]
            self._movers.append(self.attention.mover(list(caches.values()), first))

    def _branching_obstacle(self) -> str | None:
        """Why this engine's attention cannot verify branching trees, or None if it can."""
        if self.uses_mrope:
            return "the model's positions have several dimensions"
        if self.model_config.is_encoder_decoder:
            return "the model attends to an encoder as well"
        if self.vllm_config.kv_transfer_config is not None:
            return "KV leaves the engine before accepted tokens are compacted"
        parallel = self.parallel_config
        if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
            return "the KV of a text is spread over several ranks"
        if parallel.use_ubatching:
            return "steps run as several batches"
        layers = self.compilation_config.static_forward_context
        for group in self._attn_group_iterator():
            own = [layers[name] for name in group.layer_names]
            if reason := self.attention.obstacle(group, own, self.cache_config.cache_dtype):
                return str(reason)
        return None

    def warm_up_drafting(self) -> None:
        """Learn what a step costs on this device, so that only drafts that pay are sent."""
        if self._draws is not None:
            self._draws.warm_up(self.model_config.get_vocab_size(), self.device)
        if self.drafter.options.budget == "auto":
            cost = step_cost(self)  # every rank takes part
            if self.drafter.leads:
                self.drafter.proposer.cost = cost
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)

    def expect(self, trees: Sequence[DraftTree], context: int = 0) -> None:
        """Let dummy runs have a request for each of these drafts, `context` tokens behind it."""
        forest = DraftForest.of(trees)
        tree = np.arange(len(forest))
        self._scheduled = Scheduled(
            forest,
            tree,
            forest.firsts[:-1] + tree,
            np.full(len(forest), context),
            np.zeros(len(forest), np.bool_),
        )

    # ---- recall and place ------------------------------------------------------------------------

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            request.sampling_params = self.drafter.announce(request.req_id, request.sampling_params)
        for request_id, counts in messages.to_verify(scheduler_output).kept_blocks.items():
            self._give_back_blocks(request_id, counts)
        return super()._update_states(scheduler_output)

    def _give_back_blocks(self, request_id: str, counts: Sequence[int]) -> None:
        """The scheduler took the blocks behind the first so many of each KV cache group."""
        for block_ids, count in zip(self.requests[request_id].block_ids, counts, strict=True):
            del block_ids[count:]
        row = self.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            tables = self.input_batch.block_table.block_tables
            for table, count in zip(tables, counts, strict=True):
                table.num_blocks_per_row[row] = count

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any) -> Any:
        config = self.speculative_config
        if not scheduler_output.scheduled_spec_decode_tokens and not self.model_config.is_hybrid:
            self.speculative_config = None  # vLLM's shorter way; recurrent states need the other
        try:
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = config
        self._logits_indices = prepared[0]
        self._scheduled = scheduled = self._recall(scheduler_output, num_scheduled_tokens)
        if not self.drafter.backoff_left:
            self._work = self._work_of(num_scheduled_tokens, scheduled)
        forest = scheduled.forest
        if self._wanted or forest.num_nodes:
            self.report.budgets.append(forest.num_nodes)
        if forest.branching.any():
            self._place(scheduled)
        return prepared

    def _place(self, scheduled: Scheduled) -> None:
        """Set the nodes' positions. KV slots are made from the linear ones and stay as they are."""
        forest, device = scheduled.forest, self.positions.device
        nodes = scheduled.starts[forest.owners] + 1 + forest.places
        positions = scheduled.contexts[forest.owners] + forest.depths
        nodes_there, positions_there = torch.from_numpy(np.stack((nodes, positions))).to(device)
        self.positions[nodes_there] = positions_there

    def _recall(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> Scheduled:
        """The drafts of this step."""
        drafts = messages.to_verify(scheduler_output)
        if not drafts.req_ids:
            return _NO_DRAFTS
        batch = self.input_batch
        rows = np.array([batch.req_id_to_index[req_id] for req_id in drafts.req_ids])
        forest, from_proposer = drafts.forest, drafts.from_proposer
        order = np.argsort(rows)
        if (np.diff(order) < 0).any():
            rows, from_proposer = rows[order], from_proposer[order]
            forest = forest.take(order, forest.sizes[order])
        # Tokens of the prompt may be scheduled before the root.
        leads = num_scheduled_tokens[rows] - forest.sizes - 1
        starts = np.cumsum(num_scheduled_tokens)[rows] - num_scheduled_tokens[rows] + leads
        contexts = batch.num_computed_tokens_cpu[rows] + leads
        return Scheduled(
            forest, rows, starts.astype(np.int64), contexts.astype(np.int64), from_proposer
        )

    def _work_of(
        self, num_scheduled_tokens: NDArray[np.int32], scheduled: Scheduled
    ) -> StepWork | None:
        forest, num_reqs = scheduled.forest, len(num_scheduled_tokens)
        num_tokens = int(num_scheduled_tokens.sum())
        if num_tokens != num_reqs + forest.num_nodes:  # a prompt is read
            return None
        context = int(self.input_batch.num_computed_tokens_cpu[:num_reqs].sum())
        rows = (1 + forest.sizes) * scheduled.contexts
        in_trees = int(rows[forest.branching].sum())
        causal = context + int(rows.sum() - scheduled.contexts.sum()) - in_trees
        return StepWork(num_tokens, num_reqs, forest.num_nodes, context, causal, in_trees)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = self._scheduled
        branching = np.flatnonzero(scheduled.forest.branching)
        if not len(branching):
            return super()._build_attention_metadata(*args, **kwargs)
        trees = TreeBatch.build(
            scheduled.forest.take(branching, scheduled.forest.sizes[branching]),
            scheduled.rows[branching],
            scheduled.starts[branching],
            scheduled.contexts[branching],
        )
        builders = [g.get_metadata_builder() for g in self._attn_group_iterator()]
        for builder in builders:
            builder.trees = trees
        try:
            return super()._build_attention_metadata(*args, **kwargs)
        finally:
            for builder in builders:
                builder.trees = None

    # ---- verify ----------------------------------------------------------------------------------

    def _sample(
        self, logits: torch.Tensor, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        scheduled, self._scheduled = self._scheduled, _NO_DRAFTS
        if self._draws is not None:
            seeded = bool(self.input_batch.generators)
            self._draws.positions = self.positions[self._logits_indices] if seeded else None
        discarded = self._generators_of_unfinished_prefills()
        before = {row: generator.get_state() for row, generator in discarded.items()}
        try:
            if spec_decode_metadata is None or not scheduled.forest.num_nodes:
                if self.drafter.proposer.wants_roots:
                    plain = np.zeros(self.input_batch.num_reqs, np.int64)
                    self._verified = self._collect_choices(logits, plain, _NO_DRAFTS)
                return super()._sample(logits, None)
            with self._timed("verify"):
                num_nodes = np.asarray(spec_decode_metadata.num_draft_tokens)
                self._verified = verified = self._collect_choices(logits, num_nodes, scheduled)
                output, paths = self._sample_trees(logits, num_nodes, scheduled)
        finally:
            for row, state in before.items():
                discarded[row].set_state(state)
        with self._timed("compaction"):
            self._move_accepted(scheduled, paths)
        self._count(scheduled.forest, paths)
        if verified is not None:
            accepted = paths[scheduled.from_proposer]
            verified.lengths[: len(accepted)] = (accepted >= 0).sum(axis=1)
            firsts = verified.forest.firsts[: len(accepted), None]
            verified.accepted[(firsts + accepted)[accepted >= 0]] = True
        return output

    def _collect_choices(
        self, logits: torch.Tensor, num_nodes: Int64s, scheduled: Scheduled
    ) -> Verified | None:
        """What the proposer wants to know of this step, but what is accepted; None for nothing.

        Before sampling, which writes to the logits. `num_nodes` int64 [requests].
        """
        drafter, req_ids = self.drafter, self.input_batch.req_ids
        if not drafter.proposer.num_choices:
            return None
        trees = np.flatnonzero(scheduled.from_proposer)
        forest = scheduled.forest
        if len(trees) < len(forest):
            forest = forest.take(trees, forest.sizes[trees])
        rows = scheduled.rows[trees]
        if drafter.proposer.wants_roots and drafter.drafted_for:
            bare = [
                row
                for row in np.flatnonzero(num_nodes == 0).tolist()
                if req_ids[row] in drafter.drafted_for
            ]
            rows = np.concatenate([rows, np.array(bare, np.int64)])
            forest = forest.with_empty(len(bare))
        if not len(rows):
            return None
        roots = (np.cumsum(num_nodes + 1) - num_nodes - 1)[rows]
        nodes = roots[forest.owners] + 1 + forest.places
        choices = likeliest(logits, np.concatenate([roots, nodes]), drafter.proposer.num_choices)
        t, n = len(forest), forest.num_nodes
        return Verified(
            [req_ids[row] for row in rows.tolist()],
            forest,
            choices.tokens[:t],
            choices.tokens[t:],
            choices.gaps,
            np.zeros(n, np.bool_),
            np.zeros(t, np.int64),
        )

    def _sample_trees(
        self,
        logits: torch.Tensor,
        num_nodes: Int64s,
        scheduled: Scheduled,
    ) -> tuple[SamplerOutput, Int32s]:
        """Sample at every root and node, then match.

        `logits` holds a row for the root and for each node of every request, in order. Also
        returns the accepted nodes, int32 [t, longest path].
        """
        forest, rows = scheduled.forest, scheduled.rows
        device = logits.device
        root_rows = np.cumsum(num_nodes + 1) - num_nodes - 1
        node_rows = np.delete(np.arange(len(logits)), root_rows)
        nodes = NodeRows([self.requests[i] for i in self.input_batch.req_ids], forest, rows)
        metadata = replace(self.input_batch.sampling_metadata, spec_token_ids=None)
        tapes: dict[int, GeneratorStates] = {}
        thinking = None
        no_tapes = self._draws is not None or not metadata.generators
        if no_tapes and self._node_processors.rows_are_alike(metadata, nodes):
            owners = np.repeat(np.arange(len(num_nodes)), num_nodes + 1)
            sampled = self.sampler(logits, spread_metadata(metadata, owners)).sampled_token_ids
            at_roots, at_nodes = (
                SamplerOutput(sampled[torch.from_numpy(some).to(device)], None)
                for some in (root_rows, node_rows)
            )
        else:
            at_roots = self._sample_some(logits, root_rows, metadata)
            if not no_tapes:
                tapes = generator_states_for(
                    self.sampler, metadata.generators, nodes, logits.shape[-1]
                )
            if (holder := metadata.thinking_budget_state_holder) is not None:
                thinking = NodeThinking(holder, nodes)
            at_nodes = self._sample_some(
                logits,
                node_rows,
                node_metadata(
                    metadata,
                    nodes,
                    {
                        node: tape.after(depth - 1)
                        for row, tape in tapes.items()
                        for node, depth in zip(
                            nodes.of(row), nodes.tree(row).depths.tolist(), strict=True
                        )
                    },
                    self._node_processors.place(nodes),
                    thinking,
                ),
            )

        paths = accepted_paths(
            forest,
            at_roots.sampled_token_ids[:, 0].cpu().numpy()[rows],
            at_nodes.sampled_token_ids[:, 0].cpu().numpy(),
        )
        if tapes or thinking is not None:
            for row, path in zip(rows.tolist(), paths, strict=True):
                length = int((path >= 0).sum())
                if row in tapes:
                    tapes[row].spend(length)
                if thinking is not None and length:
                    thinking.accept(row, nodes.of(row)[path[length - 1]])
        return merge_outputs(at_roots, at_nodes, forest, rows, paths), paths

    def _sample_some(
        self, logits: torch.Tensor, rows: Int64s, metadata: SamplingMetadata
    ) -> SamplerOutput:
        """Sample these rows of the step's logits."""
        some = torch.from_numpy(rows).to(logits.device)
        with self._draws.of_rows(some) if self._draws is not None else nullcontext():
            return self.sampler(logits[some], metadata)

    def _count(self, forest: DraftForest, paths: Int32s) -> None:
        counters, report = self.drafter.counters, self.report
        drafted = forest.sizes > 0
        lengths = (paths >= 0).sum(axis=1)
        counters.trees += int(drafted.sum())
        counters.branching_trees += int(forest.branching.sum())
        counters.nodes += forest.num_nodes
        counters.accepted_nodes += int(lengths.sum())
        accepted = (forest.firsts[:-1, None] + paths)[paths >= 0]
        report.count_nodes(
            np.bincount(forest.sources, minlength=len(sources.NAMES)),
            np.bincount(forest.sources[accepted], minlength=len(sources.NAMES)),
        )
        report.count_lengths((1 + lengths[drafted]).tolist())

    def _move_accepted(self, scheduled: Scheduled, paths: Int32s) -> None:
        """Move the accepted nodes' KV to the slots right after the root's."""
        trees, places = np.nonzero((paths >= 0) & (paths != np.arange(paths.shape[1])))
        if not len(trees):
            return
        self.drafter.counters.moved_tokens += len(trees)
        behind = scheduled.starts[trees] + 1
        ends = torch.from_numpy(np.stack((behind + paths[trees, places], behind + places)))
        origins, targets = ends.to(self.device)
        for mover, table in zip(
            self._movers, self.input_batch.block_table.block_tables, strict=True
        ):
            slots = table.slot_mapping.gpu
            mover.move(slots[origins], slots[targets])

    def _generators_of_unfinished_prefills(self) -> dict[int, torch.Generator]:
        """Generators by row whose draw in this step will be thrown away."""
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
        # `_sample` has put these generators back already.
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
        if drafter.back_off(batch.req_ids, sampled_token_ids):
            self._observe_step(scheduler_output)
            return [[] for _ in batch.req_ids]
        with self._timed("draft"):
            emitted: list[tuple[LiveRequest, list[int]]] = []
            lengths: list[int] = []
            plain: list[int] = []
            prefill = 0
            num_tokens = batch.num_tokens_no_spec[: batch.num_reqs].tolist()
            for row, (request_id, tokens) in enumerate(
                zip(batch.req_ids, sampled_token_ids, strict=True)
            ):
                if not tokens:  # an unfinished prefill
                    computed = int(batch.num_computed_tokens_cpu[row])
                    computed += scheduler_output.num_scheduled_tokens[request_id]
                    prefill += num_tokens[row] - computed
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
            load = Load(len(plain), sum(plain), min(prefill, self.max_num_tokens))
            drafts = drafter.draft(limits, load)
        self._wanted = bool(limits)
        self._observe_step(scheduler_output)
        return [drafts.get(request_id, []) for request_id in batch.req_ids]

    def _follow(self, request_id: str) -> LiveRequest | None:
        request = self.requests[request_id]
        # Not the batch's row: vLLM leaves another request's tokens there where a prompt has none.
        prompt = np.array(request.prompt_token_ids or (), np.int32)
        if (are_ids := request.prompt_is_token_ids) is not None:
            prompt[~np.array(are_ids, np.bool_)] = UNKNOWN
        return self.drafter.follow(request_id, prompt, request.sampling_params)  # type: ignore[arg-type]

    def _observe_step(self, scheduler_output: SchedulerOutput) -> None:
        """A step lasts from the end of the last one, unless the engine may have waited between."""
        now, last = time.perf_counter(), self._last_step_end
        self._last_step_end = now
        work, self._work = self._work, None
        if last is None or scheduler_output.scheduled_new_reqs:
            return
        profile.seconds["step"] += now - last
        cost = self.drafter.proposer.cost
        if work is not None and cost is not None and work.tokens <= cost.curve.sizes[-1]:
            self.report.costs.append((cost.observe(work, now - last), now - last))

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        # One without requests is a constant of vLLM's that all such steps share.
        if (
            isinstance(output, ModelRunnerOutput)
            and output.req_ids
            and not self.drafter.backoff_left
        ):
            if (proposed := self.drafter.proposed(output.req_ids)) is not None:
                messages.attach(output, proposed)
            self._watch.look(self.report)
            step_report.attach(output, self.report)
            self.report = StepReport()
        return output

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.report.seconds[part] += elapsed
            profile.seconds[part] += elapsed

    def _on_request_state_removed(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        super()._on_request_state_removed(req_id, *args, **kwargs)
        self.drafter.finish(req_id)

    def shutdown(self) -> None:
        self.drafter.shutdown()
        super().shutdown()
