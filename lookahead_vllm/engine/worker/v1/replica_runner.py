"""Lookahead parallelism on vLLM's first model runner: ranks with whole models share draft trees.

vLLM starts the ranks as for tensor parallelism, and all get the same `SchedulerOutput`. Each rank
computes the prompts, the roots and its part of the trees. Then the ranks exchange the tokens that
they sampled at their nodes, and all accept the same paths. The KV of accepted nodes that a rank did
not compute is sent to it or recomputed in the next step, whichever takes less time.

Source: Lookahead Decoding (ICML 2024), section 3.4.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.parts import ForestParts, cut_into_parts
from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.engine import messages
from lookahead_vllm.engine.messages import DraftsToVerify
from lookahead_vllm.engine.worker.draft_step import DraftStep, split_rows
from lookahead_vllm.engine.worker.replicas import (
    AcceptedKV,
    ReplicaGroup,
    Sampled,
    exchange,
    is_verified_whole,
    masks_of_part,
    move_and_send,
    own_choices,
)
from lookahead_vllm.engine.worker.v1.blocks import slots_of
from lookahead_vllm.engine.worker.v1.runner import SynchronousRunner
from lookahead_vllm.engine.worker.v1.sampler import merged_logprobs, tokens_of
from lookahead_vllm.verify.acceptance import accepted_paths, emitted_tokens
from lookahead_vllm.verify.choices import Choices

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

logger = init_logger(f"vllm.{__name__}")

_TIMED_SENDS = 20


class _SharedDrafts(NamedTuple):
    """The drafts of a step, and how the ranks share them."""

    drafts: DraftsToVerify
    parts: ForestParts
    before_roots: Int64s
    """int64 [t]: tokens that the step computes before each root, as in `DraftStep`."""


class _MissingKV(NamedTuple):
    """The last tokens before a request's next root, whose KV is missing on some ranks."""

    counts: Int64s
    """int64 [d]: how many of them are missing on each rank."""
    end: int
    """The position of the next root."""
    sender: int
    """A rank that has all of them."""


class SynchronousReplicaRunner(SynchronousRunner):
    """Mixin for a lookahead runner that verifies a part of each step's draft trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replicas = ReplicaGroup(self.drafter.options.parallel)
        none = messages.NO_DRAFTS_TO_VERIFY
        parts = cut_into_parts(none.forest, self._replicas.size)
        self._nothing_shared = _SharedDrafts(none, parts, np.empty(0, np.int64))
        self._shared = self._nothing_shared
        """The drafts of the current step."""
        self._num_choices = 0
        """How many choices at each node the drafting rank's proposer needs."""
        self.can_recompute_kv = False
        """Whether ranks can recompute missing KV: all KV cache groups keep the whole context."""
        self.recompute_kv = False
        """Whether ranks recompute missing KV in the next step, instead of receiving it."""
        self.num_recomputed = 0
        """Tokens whose KV this rank recomputed."""
        self._missing_kv: dict[str, _MissingKV] = {}
        """By request id: what the last step left missing on some ranks."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        # Blocks before a sliding window go to other requests.
        self.can_recompute_kv = all(
            type(group.kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec)
            for group in self.kv_cache_config.kv_cache_groups
        )
        if not self.drafter.may_branch:
            logger.info_once("Lookahead verifies every draft on all %d ranks.", self._replicas.size)

    def warm_up_drafting(self) -> None:
        super().warm_up_drafting()
        self._num_choices = get_world_group().broadcast_object(self.drafter.proposer.num_choices)
        if self.drafter.may_branch and self.can_recompute_kv:
            self._choose_how_to_share()

    def _choose_how_to_share(self) -> None:
        """Set `recompute_kv`: compare the times of sending a token's KV and of computing a row.

        A row's time is the average of tokens 2 to 8 of a forward pass.
        """
        times = []
        slot = torch.zeros(1, dtype=torch.int64)  # vLLM's null block
        for _ in range(_TIMED_SENDS):
            begin = time.perf_counter()
            for mover in self._branching.movers:
                values = mover.read(slot)
                self._replicas.broadcast(values, 0)
                mover.write(slot, values)
            self._sync_device()
            times.append(time.perf_counter() - begin)
        sending = float(np.median(times))
        cost = self.drafter.proposer.cost
        if cost is not None:
            row = float(cost.curve(8) - cost.curve(1)) / 7
            self.recompute_kv = row < sending
            logger.info(
                "Lookahead: a replica %s the KV of accepted tokens that another one computed: "
                "sending a token takes %.2f ms, one more token in a forward pass %.2f ms.",
                "recomputes" if self.recompute_kv else "receives",
                1e3 * sending,
                1e3 * row,
            )
        self.recompute_kv = get_world_group().broadcast_object(self.recompute_kv)

    # ---- this rank's part ------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(self._part_of(scheduler_output), *args, **kwargs)

    def _part_of(self, step: SchedulerOutput) -> SchedulerOutput:
        """A copy of the scheduler's output without the nodes of other ranks.

        Tokens whose KV is missing on this rank are computed again, as if they were new.
        """
        self._shared = self._nothing_shared
        drafts = messages.to_verify(step)
        if not drafts.forest.num_nodes and not self._missing_kv:
            return step
        forest, req_ids = drafts.forest, drafts.req_ids
        is_whole = [self._is_verified_whole(req_id) for req_id in req_ids]
        parts = cut_into_parts(forest, self._replicas.size, np.array(is_whole, np.bool_))
        part = forest.keep(parts.contains[self._replicas.rank])
        again = self._recompute_or_send(step, drafts, parts)
        num_scheduled = {
            req_id: count + again.get(req_id, 0)
            for req_id, count in step.num_scheduled_tokens.items()
        }
        before = np.array([num_scheduled[i] for i in req_ids], np.int64) - forest.sizes - 1
        self._shared = _SharedDrafts(drafts, parts, before)
        num_scheduled.update(zip(req_ids, (before + 1 + part.sizes).tolist(), strict=True))
        kept = np.flatnonzero(part.sizes)
        own_ids = [req_ids[tree] for tree in kept.tolist()]
        cached = step.scheduled_cached_reqs
        copy = replace(
            step,
            num_scheduled_tokens=num_scheduled,
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            scheduled_cached_reqs=replace(
                cached,
                num_computed_tokens=[
                    count - again.get(req_id, 0)
                    for req_id, count in zip(
                        cached.req_ids, cached.num_computed_tokens, strict=True
                    )
                ],
            ),
            scheduled_spec_decode_tokens={
                req_id: part[tree].tokens.tolist()
                for req_id, tree in zip(own_ids, kept.tolist(), strict=True)
            },
        )
        own = drafts._replace(
            req_ids=own_ids,
            forest=part.take(kept, part.sizes[kept]),
            from_proposer=drafts.from_proposer[kept],
        )
        messages.attach(copy, own)
        messages.attach_pause(copy, messages.pause_before(step))
        return copy

    def _recompute_or_send(
        self, step: SchedulerOutput, drafts: DraftsToVerify, parts: ForestParts
    ) -> dict[str, int]:
        """Send the missing KV, or return how many tokens of each request this rank recomputes.

        KV is sent if the request is not in the step or restarts in it, if recomputing would exceed
        the longest draft, or if the step has no room. Preempted and finished requests need it
        because the scheduler may just have cached their last block, for a conversation's next turn.
        """
        missing, self._missing_kv = self._missing_kv, {}
        if not missing:
            return {}
        forest = drafts.forest
        nodes = [np.bincount(forest.owners[c], minlength=len(forest)) for c in parts.contains]
        longest = dict(zip(drafts.req_ids, np.max(nodes, axis=0).tolist(), strict=True))
        cached = step.scheduled_cached_reqs
        continued = set(cached.req_ids) - cached.resumed_req_ids
        due = {
            req_id: entry
            for req_id, entry in missing.items()
            if req_id in continued
            and longest.get(req_id, 0) + entry.counts.max() <= self.num_spec_tokens
        }
        totals = step.total_num_scheduled_tokens - forest.num_nodes + parts.contains.sum(axis=1)
        totals += sum(entry.counts for entry in due.values())
        if totals.max() > self.max_num_tokens:
            due = {}
        self._send({i: entry for i, entry in missing.items() if i not in due})
        rank = self._replicas.rank
        again = {i: int(entry.counts[rank]) for i, entry in due.items()}
        self.num_recomputed += sum(again.values())
        return again

    def _is_verified_whole(self, req_id: str) -> bool:
        """Whether every rank verifies all nodes of the request's draft."""
        params = self.requests[req_id].sampling_params
        return not self.drafter.may_branch or is_verified_whole(params)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if grammar_output is not None:
            forest, req_ids = self._shared.drafts.forest, self._shared.drafts.req_ids
            contains = self._shared.parts.contains[self._replicas.rank]
            grammar_output = masks_of_part(grammar_output, forest, req_ids, contains)
        return super().sample_tokens(grammar_output)

    # ---- what all ranks accept -------------------------------------------------------------------

    def _verify(self, logits: torch.Tensor, num_nodes: Int64s, step: DraftStep) -> SamplerOutput:
        recorder = self.drafter.recorder
        shared, self._shared = self._shared, self._nothing_shared
        trees = self._all_trees(shared)
        forest, rows = trees.forest, trees.rows
        self._count_budget(forest)
        with recorder.timed("verify"):
            choices = own_choices(logits, self._num_choices)
            draws = self._draw(logits, num_nodes, step, trees)
            roots, nodes = split_rows(num_nodes)
            sampled = np.empty(len(logits), np.int32)
            sampled[roots], sampled[nodes] = tokens_of(draws.at_roots), tokens_of(draws.at_nodes)
            req_ids = self.input_batch.req_ids
            every = exchange(self._replicas, forest, rows, shared.parts, req_ids, sampled, choices)
            paths = accepted_paths(forest, every.at_roots[rows], every.at_nodes)
            tokens = emitted_tokens(forest, rows, paths, every.at_roots, every.at_nodes)
            draws.advance(rows, paths, tokens, self.model_config.max_model_len)
        verified = self._verified = self._all_verified(trees, every)
        if len(forest):
            with recorder.timed("compaction"):
                self._share_accepted(shared, trees, paths)
            recorder.count_drafts(forest, paths)
            if verified is not None:
                trees.mark_accepted(verified, paths)
        logprobs = draws.at_nodes.logprobs_tensors
        if logprobs is not None:  # nodes on other ranks belong to requests without logprobs
            logprobs = LogprobsTensors(
                *(_spread(t, every.own_nodes, forest.num_nodes) for t in logprobs[:3])
            )
        at_nodes = SamplerOutput(draws.at_nodes.sampled_token_ids, logprobs)
        return SamplerOutput(
            torch.from_numpy(tokens).to(self.device),
            merged_logprobs(draws.at_roots, at_nodes, forest, rows, paths),
        )

    def _all_trees(self, shared: _SharedDrafts) -> DraftStep:
        """The trees of all ranks, in the order of `shared`, without places in the batch."""
        index, drafts = self.input_batch.req_id_to_index, shared.drafts
        rows = np.array([index[req_id] for req_id in drafts.req_ids], np.int64)
        contexts = self.input_batch.num_computed_tokens_cpu[rows] + shared.before_roots
        nowhere = np.full(len(rows), -1, np.int64)
        return DraftStep(
            drafts.forest, rows, nowhere, contexts, drafts.from_proposer, shared.before_roots
        )

    def _all_verified(self, trees: DraftStep, every: Sampled) -> Verified | None:
        proposer = self.drafter.proposer
        if not proposer.num_choices:
            return None
        tokens, gaps = every.choices
        return trees.verified(
            lambda rows: Choices(tokens[rows], gaps[rows]),
            every.num_nodes,
            self.input_batch.req_ids,
            self.drafter.drafted_for if proposer.wants_roots else (),
        )

    def _share_accepted(self, shared: _SharedDrafts, trees: DraftStep, paths: Int32s) -> None:
        """Move the accepted nodes' KV to the slots right after the roots, on all ranks."""
        kv = AcceptedKV.of(trees.forest, shared.parts, paths, self._replicas.rank)
        roots = trees.contexts[kv.trees]
        is_sent = kv.is_missing
        if self.recompute_kv:
            for tree in np.unique(kv.trees[is_sent]).tolist():
                path = kv.trees == tree
                req_id = shared.drafts.req_ids[tree]
                counts = (~shared.parts.contains[:, kv.nodes[path]]).sum(axis=1)
                end = int(roots[path][0] + 1 + path.sum())
                self._missing_kv[req_id] = _MissingKV(counts, end, int(kv.senders[path][0]))
            is_sent = np.zeros_like(is_sent)
        self.drafter.recorder.counters.moved_tokens += int((kv.origins != kv.targets).sum())
        self._move_and_send(
            trees.rows[kv.trees],
            roots + kv.origins,
            roots + kv.targets,
            kv.has,
            np.where(is_sent, kv.senders, -1),
        )

    def _send(self, missing: Mapping[str, _MissingKV]) -> None:
        """Send each rank the KV that is missing on it."""
        if not missing:
            return
        counts, ends = (np.array([entry[i] for entry in missing.values()]) for i in (0, 1))
        longest = counts.max(axis=1)
        index = self.input_batch.req_id_to_index
        rows = np.repeat([index[req_id] for req_id in missing], longest)
        senders = np.repeat([entry.sender for entry in missing.values()], longest)
        back = np.concatenate([np.arange(n, 0, -1) for n in longest])
        positions = np.repeat(ends, longest) - back
        has = back > np.repeat(counts[:, self._replicas.rank], longest)
        self._move_and_send(rows, positions, positions, has, senders)

    def _move_and_send(
        self,
        rows: Int64s,
        origins: Int64s,
        targets: Int64s,
        has: NDArray[np.bool_],
        senders: Int64s,
    ) -> None:
        """See `move_and_send`; `rows` int64 [m] of the batch have the tokens."""
        tables = self.input_batch.block_table.block_tables

        def slots(group: int, positions: Int64s) -> torch.Tensor:
            return slots_of(tables[group], rows, positions).to(self.device)

        move_and_send(self._replicas, self._branching.movers, slots, origins, targets, has, senders)


def _spread(values: torch.Tensor, nodes: Int64s, num_nodes: int) -> torch.Tensor:
    """The rows of `values` at the places `nodes` of `num_nodes` rows; the others are zero."""
    spread = values.new_zeros(num_nodes, *values.shape[1:])
    spread[torch.from_numpy(nodes).to(values.device)] = values
    return spread
