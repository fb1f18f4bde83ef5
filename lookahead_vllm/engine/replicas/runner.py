"""Lookahead parallelism on Model Runner V2: ranks with whole models share draft trees.

vLLM starts the ranks as for tensor parallelism, and all get the same `SchedulerOutput`. Each rank
computes the prompts, the roots and its part of the trees. Then the ranks exchange the tokens that
they sampled at their nodes, and all accept the same paths. The KV of accepted nodes that a rank did
not compute is sent to it.

The ranks exchange tokens on their hosts, so a step with drafts ends only when they have met there.

Source: Lookahead Decoding (ICML 2024), section 3.4.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.parts import ForestParts, cut_into_parts
from lookahead_vllm.engine.replicas.replicas import (
    AcceptedKV,
    ReplicaGroup,
    exchange,
    is_verified_whole,
    masks_of_part,
    move_and_send,
    own_choices,
)
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.engine.step.drafts import Drafts
from lookahead_vllm.engine.step.sampler import NodeSampler, RootSampler
from lookahead_vllm.engine.step.step import Step, ThisStep
from lookahead_vllm.verify.acceptance import accepted_paths, emitted_tokens
from lookahead_vllm.verify.choices import Choices
from lookahead_vllm.verify.transfer import to_device
from lookahead_vllm.verify.walk import Walk


class ReplicaSampler(NodeSampler):
    """Samples at this rank's rows; then `accept`, `ReplicaRunner._accept`, finds the paths together
    with the other ranks, and moves KV."""

    max_rows = sys.maxsize

    def __init__(
        self, sampler: RootSampler, this_step: ThisStep, accept: Callable[[torch.Tensor], Walk]
    ) -> None:
        super().__init__(sampler, this_step)
        self._accept = accept

    def _walk(self, sampled: torch.Tensor, *args: Any) -> Walk:
        return self._accept(sampled)


class ReplicaRunner(LookaheadRunner):
    """Mixin for a lookahead runner that verifies a part of each step's draft trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replicas = ReplicaGroup(self.drafter.options.parallel)
        self._parts: ForestParts
        """How the ranks share the trees of this step."""
        self._choices: Choices | None = None
        """The model's choices at this rank's rows."""
        self._num_choices = 0
        """How many choices at each node the drafting rank's proposer needs."""
        self._verified_whole: set[str] = set()
        """Requests whose drafts every rank verifies whole."""

    def _make_node_sampler(self, sampler: RootSampler, *args: Any, **kwargs: Any) -> NodeSampler:
        return ReplicaSampler(sampler, self._this_step, self._accept)

    def warm_up_drafting(self) -> None:
        super().warm_up_drafting()
        self._num_choices = get_world_group().broadcast_object(self.drafter.proposer.num_choices)

    # ---- this rank's part ------------------------------------------------------------------------

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._verified_whole.discard(new.req_id)
            if is_verified_whole(new.sampling_params):
                self._verified_whole.add(new.req_id)
        super().add_requests(scheduler_output)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().finish_requests(scheduler_output)
        self._verified_whole -= scheduler_output.finished_req_ids

    def _keep_drafts(self, step: Step, drafts: Drafts) -> None:
        whole = get_world_group().broadcast_object(drafts, src=0)
        super()._keep_drafts(step, whole)
        is_whole = [
            not self.drafter.may_branch or req_id in self._verified_whole
            for req_id in whole.req_ids
        ]
        self._parts = cut_into_parts(
            whole.forest, self._replicas.size, np.array(is_whole, np.bool_)
        )
        own = whole.forest.keep(self._parts.contains[self._replicas.rank])
        step.drafts = whole._replace(forest=own)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        batch: InputBatch = super().prepare_inputs(*args, **kwargs)
        if self.step.whole.forest.num_nodes and not batch.num_draft_tokens:
            batch.num_draft_tokens = 1  # so that vLLM samples as on the ranks that have nodes
        return batch

    def _place(self, step: Step) -> None:
        super()._place(step)
        batch, whole = step.batch, step.whole
        counts = batch.num_scheduled_tokens.copy()
        counts[whole.rows_in(batch.req_ids)] = 1 + whole.forest.sizes  # as if it had all nodes
        step.whole_trees = whole.in_batch(batch.req_ids, counts)

    def _move(self, *args: Any) -> None:
        """Nothing: `_accept` has moved all KV."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if grammar_output is not None and self.step.whole.forest.num_nodes:
            contains = self._parts.contains[self._replicas.rank]
            whole = self.step.whole
            grammar_output = masks_of_part(grammar_output, whole.forest, whole.req_ids, contains)
        return super().sample_tokens(grammar_output)

    def sample(self, *args: Any) -> Any:
        output = super().sample(*args)
        if not self.step.whole.forest.num_nodes:
            self._replicas.broadcast(output[0].sampled_token_ids, 0)
        return output

    # ---- what all ranks accept -------------------------------------------------------------------

    def _observe(self, logits: torch.Tensor, batch: InputBatch) -> None:
        if self.step.whole.forest.num_nodes:
            self._choices = own_choices(logits, self._num_choices)
        else:
            super()._observe(logits, batch)

    def _accept(self, sampled: torch.Tensor) -> Walk:
        """The accepted paths of all requests of the batch, given the tokens of this rank's rows."""
        batch, forest = self.step.batch, self.step.whole.forest
        rows = self.step.whole.rows_in(batch.req_ids)
        assert self._choices is not None
        every = exchange(
            self._replicas,
            forest,
            rows,
            self._parts,
            batch.req_ids,
            sampled.cpu().numpy().astype(np.int32),
            self._choices,
        )
        paths = accepted_paths(forest, every.at_roots[rows], every.at_nodes)
        tokens: Int32s = emitted_tokens(forest.firsts, rows, paths, every.at_roots, every.at_nodes)
        self._share_accepted(paths, rows)
        if self.drafter.proposer.num_choices:
            self.step.verified = self.step.whole_trees.verified(
                every.choices, every.starts, batch.req_ids, self._late.drafted_for
            )
        none = torch.empty(0, dtype=torch.int64)
        return Walk(
            to_device(np.maximum(tokens, 0).astype(np.int64), sampled.device),
            to_device((tokens >= 0).sum(axis=1, dtype=np.int32), sampled.device),
            to_device(self._order(paths, rows), sampled.device),
            none,
            none,
        )

    def _order(self, paths: Int32s, rows: Int64s) -> Int64s:
        """`Walk.order` of this rank's rows; right for the trees that it verifies whole."""
        firsts = self.step.batch.cu_num_logits_np
        order = np.arange(firsts[-1], dtype=np.int64)
        for tree, path in enumerate(paths):
            if self.step.whole.req_ids[tree] in self._verified_whole:
                first = firsts[rows[tree]] + 1
                path = path[path >= 0]
                order[first : first + len(path)] = first + path
        return order

    def _share_accepted(self, paths: Int32s, rows: Int64s) -> None:
        """Move the accepted nodes' KV to the slots right after the roots, on all ranks."""
        whole = self.step.whole
        kv = AcceptedKV.of(whole.forest, self._parts, paths, self._replicas.rank)
        entries = self.step.batch.idx_mapping_np[rows[kv.trees]]
        roots = whole.num_tokens[kv.trees] - 1
        tables = self.block_tables

        def slots(group: int, positions: Int64s) -> torch.Tensor:
            size, table = tables.block_sizes[group], tables.block_tables[group].gpu
            places = np.stack((entries, positions // size, positions % size)).astype(np.int64)
            requests, blocks, offsets = to_device(places, table.device)
            return table[requests, blocks].long() * size + offsets

        move_and_send(
            self._replicas,
            self._branching.movers,
            slots,
            roots + kv.origins,
            roots + kv.targets,
            kv.has,
            kv.senders,
        )
