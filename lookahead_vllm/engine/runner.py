"""The model runner's side of a draft tree's life: recall, place, verify, compact, propose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.worker import gpu_model_runner

from lookahead_vllm.draft.budget import CostCurve
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.engine import metrics, profile
from lookahead_vllm.engine.attention import TREE_ISAS, TreeAttentionBackend
from lookahead_vllm.engine.drafter import LookaheadDrafter
from lookahead_vllm.engine.grammar import PARENTS
from lookahead_vllm.engine.sampler import (
    NodeProcessors,
    NodeRows,
    NodeThinking,
    merge_outputs,
    node_metadata,
    tapes_for,
    with_every_processor,
)
from lookahead_vllm.verify import tree_attention
from lookahead_vllm.verify.acceptance import accepted_path
from lookahead_vllm.verify.kv_moves import KVMover
from lookahead_vllm.verify.tree_batch import TreeBatch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Base
else:
    _Base = object

logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True)
class Scheduled:
    """A draft that is being verified in this step."""

    request_id: str
    tree: DraftTree
    start: int
    """Index of the root in the step's flattened tokens; the nodes follow."""
    context: int
    """Committed tokens before the root, which is the root's position."""


class LookaheadRunner(_Base):
    """Mixed into one of vLLM's V1 model runners, in front of it."""

    drafter: LookaheadDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original = gpu_model_runner.build_logitsprocs
        gpu_model_runner.build_logitsprocs = with_every_processor(original)
        try:
            super().__init__(*args, **kwargs)
        finally:
            gpu_model_runner.build_logitsprocs = original
        self._node_processors = NodeProcessors(
            self.vllm_config,
            self.device,
            tuple(self.model_config.logits_processors or ()),
            original,
        )
        self._scheduled: dict[int, Scheduled] = {}
        """The drafts of the step under way, by row of the batch."""
        self._branching: dict[int, Scheduled] = {}
        """Those of them that are no chains."""
        self._movers: list[KVMover] = []
        """One for each KV cache group, where trees may branch."""
        self._last_step_end: float | None = None
        self.report = metrics.StepReport()
        """Of the step under way; sent with its output."""
        self._wanted = False
        """Whether a request of the step under way could have a draft."""
        self._trie_watch = metrics.TrieWatch(self.drafter.proposer)

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
            first = next(iter(caches.values()))
            self._movers.append(KVMover(list(caches.values()), first.shape[2]))

    def _branching_obstacle(self) -> str | None:
        """Why this engine's attention cannot verify branching trees, or None if it can."""
        if self.uses_mrope:
            return "the model's positions have several dimensions"
        if self.model_config.is_encoder_decoder:
            return "the model attends to an encoder as well"
        if self.vllm_config.kv_transfer_config is not None:
            return "KV leaves the engine before accepted tokens are compacted"
        for group in self._attn_group_iterator():
            # A layer that changes what its rows see (chunks, an encoder) derives a backend of ours.
            if group.backend is not TreeAttentionBackend:
                return f"there is no tree attention for the backend {group.backend.__name__}"
            builder = group.get_metadata_builder()
            if builder.isa not in TREE_ISAS:
                return f"the KV layout of instruction set {builder.isa!r} is unknown"
            if self.cache_config.cache_dtype.startswith("fp8"):
                return "there is no tree attention over an fp8 KV cache"
            if not tree_attention.supported(builder.head_dim, builder.dtype, builder.block_size):
                return f"there is no tree attention for heads of {builder.head_dim} {builder.dtype}"
        return None

    def warm_up_drafting(self) -> None:
        """Learn what a step costs on this device, so that only drafts that pay are sent."""
        if self.drafter.options.budget == "auto":
            curve = self.measure_step_cost()
            self.drafter.proposer.curve = curve
            logger.info_once("Lookahead measured the cost of a step: %s.", curve)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)

    def measure_step_cost(self, seconds: float = 5.0) -> CostCurve:
        """Time forward passes over 1, 2, 4, ... tokens, logits included.

        Stops early when `seconds` are used up; the curve then goes on with its last slope.
        """
        deadline = time.perf_counter() + seconds
        sizes: list[int] = []
        times: list[float] = []
        for size in (1, 2, 4, 8, 16, 32, 64, 128):
            if size > self.max_num_tokens or (len(sizes) > 2 and time.perf_counter() > deadline):
                break
            best = float("inf")
            for _ in range(4):
                start = time.perf_counter()
                hidden, last = self._dummy_run(size, skip_eplb=True)
                # Adapters are laid out for one row of logits a request.
                self.model.compute_logits(last if self.lora_config else hidden[:size])
                self._sync_device()
                best = min(best, time.perf_counter() - start)
            sizes.append(size)
            times.append(best)
        return CostCurve(sizes, times)

    # ---- recall and place ------------------------------------------------------------------------

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            request.sampling_params = self.drafter.announce(request.req_id, request.sampling_params)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._scheduled = self._recall(scheduler_output, num_scheduled_tokens)
        self._branching = {r: s for r, s in self._scheduled.items() if not s.tree.is_chain}
        if branching := self._branching.values():
            # KV slots are made from the linear positions and stay as they are.
            nodes = np.concatenate(
                [np.arange(s.start + 1, s.start + 1 + len(s.tree)) for s in branching]
            )
            positions = np.concatenate([s.context + s.tree.depths for s in branching])
            self.positions[torch.from_numpy(nodes)] = torch.from_numpy(positions).to(
                self.positions.dtype
            )
        return prepared

    def _recall(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> dict[int, Scheduled]:
        """The drafts of this step by row of the batch."""
        batch = self.input_batch
        scheduled: dict[int, Scheduled] = {}
        shapes = getattr(scheduler_output, PARENTS)
        starts = np.cumsum(num_scheduled_tokens) - num_scheduled_tokens
        for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            row = batch.req_id_to_index[request_id]
            # Tokens of the prompt may be scheduled before the root.
            lead = int(num_scheduled_tokens[row]) - len(tokens) - 1
            if request_id in shapes:
                tree = DraftTree.from_lists(tokens, shapes[request_id])
            elif lead == 0 and not self._has_grammar(request_id):
                tree = self.drafter.recall(request_id, tokens)
            else:
                tree = DraftTree.chain(tokens)
            scheduled[row] = Scheduled(
                request_id,
                tree,
                int(starts[row]) + lead,
                int(batch.num_computed_tokens_cpu[row]) + lead,
            )
        return scheduled

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        branching = self._branching
        if not branching:
            return super()._build_attention_metadata(*args, **kwargs)
        trees = TreeBatch.build(
            [s.tree for s in branching.values()],
            rows=list(branching),
            starts=[s.start for s in branching.values()],
            contexts=[s.context for s in branching.values()],
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
        scheduled, self._scheduled, self._branching = self._scheduled, {}, {}
        discarded = self._generators_of_unfinished_prefills()
        before = {row: generator.get_state() for row, generator in discarded.items()}
        try:
            if self._wanted:
                self.report.budgets.append(sum(len(s.tree) for s in scheduled.values()))
            if spec_decode_metadata is None or not any(len(s.tree) for s in scheduled.values()):
                return super()._sample(logits, None)
            with profile.timed("verify"), self.report.timed("verify"):
                output, paths = self._sample_trees(logits, spec_decode_metadata, scheduled)
        finally:
            for row, state in before.items():
                discarded[row].set_state(state)
        with profile.timed("kv_moves"), self.report.timed("compaction"):
            self._move_accepted(scheduled, paths)
        return output

    def _sample_trees(
        self,
        logits: torch.Tensor,
        spec_decode_metadata: SpecDecodeMetadata,
        scheduled: dict[int, Scheduled],
    ) -> tuple[SamplerOutput, dict[int, list[int]]]:
        """Sample at every root and node, then match.

        `logits` holds a row for the root and for each node of every request, in order.
        """
        num_nodes = np.asarray(spec_decode_metadata.num_draft_tokens)
        num_reqs, device = len(num_nodes), logits.device
        root_rows = np.cumsum(num_nodes + 1) - num_nodes - 1
        node_rows = np.delete(np.arange(len(logits)), root_rows)
        trees = {row: s.tree for row, s in scheduled.items() if len(s.tree)}
        nodes = NodeRows([self.requests[i] for i in self.input_batch.req_ids], trees)

        metadata = replace(self.input_batch.sampling_metadata, spec_token_ids=None)
        at_roots = self.sampler(logits[torch.from_numpy(root_rows).to(device)], metadata)
        tapes = tapes_for(self.sampler, metadata.generators, trees, logits.shape[-1])
        thinking = None
        if (holder := metadata.thinking_budget_state_holder) is not None:
            thinking = NodeThinking(holder, nodes)
        at_nodes = self.sampler(
            logits[torch.from_numpy(node_rows).to(device)],
            node_metadata(
                metadata,
                nodes,
                {
                    node: tape.after(depth - 1)
                    for row, tape in tapes.items()
                    for node, depth in zip(nodes.of(row), trees[row].depths.tolist(), strict=True)
                },
                self._node_processors.place(nodes),
                thinking,
            ),
        )

        root_tokens = at_roots.sampled_token_ids[:, 0].tolist()
        node_tokens = at_nodes.sampled_token_ids[:, 0].tolist()
        emitted: list[list[int]] = []
        sources: list[list[int]] = []
        paths: dict[int, list[int]] = {}
        for row in range(num_reqs):
            own = nodes.of(row)
            choices = [root_tokens[row], *node_tokens[own.start : own.stop]]
            paths[row] = path = accepted_path(trees.get(row, EMPTY_TREE), choices)
            emitted.append([choices[0], *(choices[i + 1] for i in path)])
            sources.append([row, *(num_reqs + own[i] for i in path)])
            if row in tapes:
                tapes[row].spend(len(path))
            if thinking is not None and path:
                thinking.accept(row, own[path[-1]])
        self._count(trees, paths)
        return merge_outputs(at_roots, at_nodes, emitted, sources), paths

    def _count(self, trees: dict[int, DraftTree], paths: dict[int, list[int]]) -> None:
        counters = self.drafter.counters
        for row, tree in trees.items():
            counters.trees += 1
            counters.branching_trees += not tree.is_chain
            counters.nodes += len(tree)
            counters.accepted_nodes += len(paths[row])
            self.report.count_nodes([len(tree)], [len(paths[row])])
        self.report.count_lengths(len(paths[row]) + 1 for row in trees)

    def _move_accepted(self, scheduled: dict[int, Scheduled], paths: dict[int, list[int]]) -> None:
        """Move the accepted nodes' KV to the slots right after the root's."""
        sources: list[int] = []
        targets: list[int] = []
        for row, draft in scheduled.items():
            for place, node in enumerate(paths[row]):
                if node != place:
                    sources.append(draft.start + 1 + node)
                    targets.append(draft.start + 1 + place)
        if not sources:
            return
        self.drafter.counters.moved_tokens += len(sources)
        for mover, table in zip(
            self._movers, self.input_batch.block_table.block_tables, strict=True
        ):
            slots = table.slot_mapping.gpu
            mover.move(slots[sources], slots[targets])

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
        batch = self.input_batch
        wants = []
        with profile.timed("draft"), self.report.timed("draft"):
            for row, tokens in enumerate(sampled_token_ids):
                if not tokens:  # an unfinished prefill
                    continue
                request_id = batch.req_ids[row]
                params = self.requests[request_id].sampling_params
                prompt = batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]]
                self.drafter.commit(request_id, prompt, tokens, params)
                want = self.drafter.want(request_id, int(batch.num_tokens_no_spec[row]), params)
                if want is not None:
                    wants.append(want)
            drafts = self.drafter.draft(wants, batch.num_reqs - len(wants))
        self._wanted = bool(wants)
        self._observe_step(scheduler_output)
        return [drafts.get(request_id, []) for request_id in batch.req_ids]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts = super().take_draft_token_ids()
        if drafts is not None:
            shapes = {
                request_id: self.drafter.recall(request_id, tokens).parents.tolist()
                for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
                if tokens and self._has_grammar(request_id)
            }
            setattr(drafts, PARENTS, shapes)
        return drafts

    def _has_grammar(self, request_id: str) -> bool:
        params = self.requests[request_id].sampling_params
        return params is not None and params.structured_outputs is not None

    def _observe_step(self, scheduler_output: SchedulerOutput) -> None:
        """A step lasts from the end of the last one, unless the engine may have waited between."""
        now, last = time.perf_counter(), self._last_step_end
        self._last_step_end = now
        if last is None or scheduler_output.scheduled_new_reqs:
            return
        profile.seconds["step"] += now - last
        if (curve := self.drafter.proposer.curve) is not None:
            predicted = float(curve(scheduler_output.total_num_scheduled_tokens))
            self.report.costs.append((predicted, now - last))
            curve.observe(scheduler_output.total_num_scheduled_tokens, now - last)

    # ---- report ----------------------------------------------------------------------------------

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        self._trie_watch.look(self.report)
        if metrics.attach(output, self.report):
            self.report = metrics.StepReport()
        return output

    def _on_request_state_removed(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        super()._on_request_state_removed(req_id, *args, **kwargs)
        self.drafter.finish(req_id)

    def shutdown(self) -> None:
        self.drafter.shutdown()
        super().shutdown()
