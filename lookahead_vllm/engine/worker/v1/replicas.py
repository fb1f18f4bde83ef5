"""Lookahead parallelism on vLLM's first model runner: ranks with whole models share draft trees.

vLLM starts the ranks as for tensor parallelism, and all get the same `SchedulerOutput`. Each rank
computes the prompts, the roots and its part of the trees. Then it learns from the others what they
sampled at their nodes, and all ranks accept the same paths. The KV of accepted nodes that a rank
did not compute is sent to it.

Source: Lookahead Decoding (ICML 2024), section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_world_group, init_model_parallel_group
from vllm.logger import init_logger
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.parts import ForestParts, cut_into_parts
from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.engine import config, messages
from lookahead_vllm.engine.grammar import joined_masks, split_masks
from lookahead_vllm.engine.messages import DraftsToVerify
from lookahead_vllm.engine.worker.draft_step import DraftStep, root_rows, split_rows
from lookahead_vllm.engine.worker.v1.blocks import slots_of
from lookahead_vllm.engine.worker.v1.runner import LookaheadRunner
from lookahead_vllm.engine.worker.v1.sampler import Draws, merged_logprobs, tokens_of
from lookahead_vllm.verify.acceptance import accepted_paths, emitted_tokens
from lookahead_vllm.verify.choices import Choices, top_choices

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

logger = init_logger(f"vllm.{__name__}")


def become_replica(vllm_config: VllmConfig) -> None:
    """Change a worker's own copy of the config: the ranks of a replica alone share its weights."""
    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size //= config.options_of(vllm_config).parallel


class Replicas:
    """The ranks, one of each replica, that exchange what they sampled.

    Attributes
    ----------
    size, rank : int
        The number of replicas, and the one of this rank.
    """

    def __init__(self, size: int) -> None:
        world = get_world_group()
        group, step = world, world.world_size // size
        if step > 1:  # tensor parallelism within each replica
            group = init_model_parallel_group(
                [list(range(first, world.world_size, step)) for first in range(step)],
                world.local_rank,
                torch.distributed.get_backend(world.device_group),
                use_device_communicator=False,
                group_name="replicas",
            )
        self.size, self.rank = size, group.rank_in_group
        self._group = group

    def gather(self, own: Int32s, sizes: Sequence[int]) -> list[Int32s]:
        """The arrays of all ranks, in order.

        Parameters
        ----------
        own : int32 [sizes[rank], w]
            This rank's array.
        sizes
            The number of rows of each rank's array.
        """
        longest, width = max(sizes), own.shape[1]
        sent = torch.zeros(longest, width, dtype=torch.int32)
        sent[: len(own)] = torch.from_numpy(own)
        received = torch.empty(self.size, longest, width, dtype=torch.int32)
        torch.distributed.all_gather(list(received), sent, group=self._group.cpu_group)
        return [array[:size] for array, size in zip(received.numpy(), sizes, strict=True)]

    def broadcast(self, values: torch.Tensor, sender: int) -> None:
        """Overwrite `values` with those of the rank `sender`."""
        group = self._group
        torch.distributed.broadcast(values, group.ranks[sender], group=group.device_group)


class _SharedDrafts(NamedTuple):
    """The drafts of a step, and how the ranks share them."""

    drafts: DraftsToVerify
    parts: ForestParts
    before_roots: Int64s
    """int64 [t]: tokens of the prompt that the step computes before each root."""


class _Everything(NamedTuple):
    """What all ranks together have sampled, in rows as if one rank had the logits of all nodes."""

    at_roots: Int32s
    """int32 [r]: a token for each request of the batch."""
    at_nodes: Int32s
    """int32 [n]: a token for each node of all trees."""
    choices: Choices
    """The model's choices at each of the r + n rows, where they were asked for."""
    num_nodes: Int64s
    """int64 [r]: the nodes of each request of the batch."""
    own_nodes: Int64s
    """int64 [m]: the nodes of all trees that this rank has, in the order of its own logits."""


class ReplicaRunner(LookaheadRunner):
    """Mixin for a lookahead runner that verifies a part of each step's draft trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replicas = Replicas(self.drafter.options.parallel)
        none = messages.NO_DRAFTS_TO_VERIFY
        parts = cut_into_parts(none.forest, self._replicas.size)
        self._nothing_shared = _SharedDrafts(none, parts, np.empty(0, np.int64))
        self._shared = self._nothing_shared
        """The drafts of the current step."""
        self._num_choices = 0
        """The choices at each node that the drafting rank's proposer wants."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        if not self.drafter.may_branch:
            logger.info_once("Lookahead verifies every draft on all %d ranks.", self._replicas.size)

    def warm_up_drafting(self) -> None:
        super().warm_up_drafting()
        self._num_choices = get_world_group().broadcast_object(self.drafter.proposer.num_choices)

    # ---- this rank's part ------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(self._part_of(scheduler_output), *args, **kwargs)

    def _part_of(self, step: SchedulerOutput) -> SchedulerOutput:
        """A copy of the scheduler's output without the nodes of other ranks."""
        self._shared = self._nothing_shared
        drafts = messages.to_verify(step)
        if not drafts.forest.num_nodes:
            return step
        forest, req_ids = drafts.forest, drafts.req_ids
        is_whole = [self._is_verified_whole(req_id) for req_id in req_ids]
        parts = cut_into_parts(forest, self._replicas.size, np.array(is_whole))
        num_scheduled = np.array([step.num_scheduled_tokens[req_id] for req_id in req_ids])
        self._shared = _SharedDrafts(drafts, parts, num_scheduled - forest.sizes - 1)
        part = forest.keep(parts.contains[self._replicas.rank])
        kept = np.flatnonzero(part.sizes)
        own_ids = [req_ids[tree] for tree in kept.tolist()]
        fewer = dict(
            zip(req_ids, (num_scheduled - forest.sizes + part.sizes).tolist(), strict=True)
        )
        copy = replace(
            step,
            num_scheduled_tokens={**step.num_scheduled_tokens, **fewer},
            total_num_scheduled_tokens=(
                step.total_num_scheduled_tokens - forest.num_nodes + part.num_nodes
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
        return copy

    def _is_verified_whole(self, req_id: str) -> bool:
        """Whether every rank verifies all nodes of the request's draft.

        The first rank returns the logprobs of accepted nodes, and all ranks need their thinking
        budgets.
        """
        params: SamplingParams | None = self.requests[req_id].sampling_params
        return not self.drafter.may_branch or (
            params is not None
            and (
                params.logprobs is not None
                or bool(params.logprob_token_ids)
                or params.thinking_token_budget is not None
            )
        )

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if grammar_output is not None:
            grammar_output = self._masks_of_part(grammar_output, self._shared)
        return super().sample_tokens(grammar_output)

    def _masks_of_part(self, grammar: GrammarOutput, shared: _SharedDrafts) -> GrammarOutput:
        req_ids, forest = grammar.structured_output_request_ids, shared.drafts.forest
        contains = shared.parts.contains[self._replicas.rank]
        own = {
            req_id: contains[forest.firsts[tree] : forest.firsts[tree + 1]]
            for tree, req_id in enumerate(shared.drafts.req_ids)
        }
        no_nodes = np.empty(0, np.bool_)
        kept = [own.get(req_id, no_nodes) for req_id in req_ids]
        masks = split_masks(grammar, [len(nodes) for nodes in kept])
        return joined_masks(
            req_ids,
            [
                mask[: 1 + len(nodes)][np.append(True, nodes)]
                for mask, nodes in zip(masks, kept, strict=True)
            ],
            [int(nodes.sum()) for nodes in kept],
        )

    # ---- what all ranks accept -------------------------------------------------------------------

    def _verify(self, logits: torch.Tensor, num_nodes: Int64s, step: DraftStep) -> SamplerOutput:
        recorder = self.drafter.recorder
        shared, self._shared = self._shared, self._nothing_shared
        trees = self._all_trees(shared)
        forest, rows = trees.forest, trees.rows
        self._count_budget(forest)
        with recorder.timed("verify"):
            choices = self._own_choices(logits)
            draws = self._draw(logits, num_nodes, step, trees)
            every = self._exchange(shared, trees, draws, choices, num_nodes)
            paths = accepted_paths(forest, every.at_roots[rows], every.at_nodes)
            draws.advance(rows, paths)
        verified = self._verified = self._all_verified(trees, every)
        if len(forest):
            with recorder.timed("compaction"):
                self._share_accepted(shared, trees, paths)
            recorder.count_drafts(forest, paths)
            if verified is not None:
                trees.mark_accepted(verified, paths)
        logprobs = draws.at_nodes.logprobs_tensors
        if logprobs is not None:  # the nodes of other ranks belong to requests that want none
            logprobs = LogprobsTensors(
                *(_spread(t, every.own_nodes, forest.num_nodes) for t in logprobs[:3])
            )
        tokens = emitted_tokens(forest, rows, paths, every.at_roots, every.at_nodes)
        at_nodes = SamplerOutput(draws.at_nodes.sampled_token_ids, logprobs)
        return SamplerOutput(
            torch.from_numpy(tokens).to(self.device),
            merged_logprobs(draws.at_roots, at_nodes, forest, rows, paths),
        )

    def _all_trees(self, shared: _SharedDrafts) -> DraftStep:
        """The trees of all ranks, in the order of `shared`; they have no places in the batch."""
        index, drafts = self.input_batch.req_id_to_index, shared.drafts
        rows = np.array([index[req_id] for req_id in drafts.req_ids], np.int64)
        contexts = self.input_batch.num_computed_tokens_cpu[rows] + shared.before_roots
        nowhere = np.full(len(rows), -1, np.int64)
        return DraftStep(
            drafts.forest, rows, nowhere, contexts, drafts.from_proposer, shared.before_roots
        )

    def _own_choices(self, logits: torch.Tensor) -> Choices:
        """The model's choices at each row of the logits, as many as the proposer wants."""
        if self._num_choices:
            return top_choices(logits, np.arange(len(logits)), self._num_choices)
        none = len(logits), 0
        return Choices(np.empty(none, np.int32), np.empty(none, np.float32))

    def _exchange(
        self,
        shared: _SharedDrafts,
        trees: DraftStep,
        draws: Draws,
        choices: Choices,
        num_nodes: Int64s,
    ) -> _Everything:
        """Learn what the other ranks sampled at their nodes, and the first rank at the roots.

        `choices` and `num_nodes`, int64 [r], are of this rank's logits.
        """
        forest, (owners, contains) = trees.forest, shared.parts
        all_nodes = np.zeros_like(num_nodes)
        all_nodes[trees.rows] = forest.sizes
        # Rows as if this rank had the logits of all nodes.
        roots = root_rows(all_nodes)
        nodes = roots[trees.rows][forest.owners] + 1 + forest.places
        here = np.sort(np.concatenate([roots, nodes[contains[self._replicas.rank]]]))
        k = self._num_choices
        mine = np.empty((len(here), 1 + 2 * k), np.int32)
        own_roots, own_rows = split_rows(num_nodes)
        mine[own_roots, 0] = tokens_of(draws.at_roots)
        mine[own_rows, 0] = tokens_of(draws.at_nodes)
        mine[:, 1 : 1 + k] = choices.tokens
        mine[:, 1 + k :] = choices.gaps.view(np.int32)
        every = np.empty((len(roots) + len(nodes), mine.shape[1]), np.int32)
        every[here] = mine
        # Ranks may have the requests in different orders: attention sorts them by their tokens.
        req_ids = self.input_batch.req_ids
        by_id = np.array(sorted(range(len(req_ids)), key=req_ids.__getitem__))
        sent = [nodes[owners == rank] for rank in range(self._replicas.size)]
        sent[0] = np.concatenate([roots[by_id], sent[0]])
        received = self._replicas.gather(every[sent[self._replicas.rank]], [len(i) for i in sent])
        for places, rows in zip(sent, received, strict=True):
            every[places] = rows
        index = np.full(len(every), -1)
        index[nodes] = np.arange(len(nodes))
        own_nodes = index[here]
        return _Everything(
            every[roots, 0],
            every[nodes, 0],
            Choices(every[:, 1 : 1 + k], every[:, 1 + k :].view(np.float32)),
            all_nodes,
            own_nodes[own_nodes >= 0],
        )

    def _all_verified(self, trees: DraftStep, every: _Everything) -> Verified | None:
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
        """Bring the accepted nodes' KV to the slots right after the roots, on all ranks."""
        of_tree, depths = np.nonzero(paths >= 0)
        forest, (owners, contains), rank = trees.forest, shared.parts, self._replicas.rank
        nodes = forest.firsts[of_tree] + paths[of_tree, depths]
        has = contains[rank][nodes]
        places = np.full(forest.num_nodes, -1)
        places[contains[rank]] = forest.keep(contains[rank]).places
        after_roots = trees.contexts[of_tree] + 1
        targets = after_roots + depths
        origins = np.where(has, after_roots + places[nodes], targets)
        # The owner of a path's last node has the whole path.
        last = np.cumsum((paths >= 0).sum(axis=1))[of_tree] - 1
        senders = owners[nodes[last]]
        is_sent = ~contains[:, nodes].all(axis=0)
        if not is_sent.any() and (origins == targets).all():
            return
        sent = [np.flatnonzero(is_sent & (senders == i)) for i in range(self._replicas.size)]
        self.drafter.recorder.counters.moved_tokens += int((origins != targets).sum())
        rows = trees.rows[of_tree]
        for mover, table in zip(
            self._movers, self.input_batch.block_table.block_tables, strict=True
        ):
            here, there = (slots_of(table, rows, places) for places in (origins, targets))
            received = []
            for sender, entries in enumerate(sent):
                if len(entries):
                    values = mover.read(here[entries])  # a receiver reads what it overwrites
                    self._replicas.broadcast(values, sender)
                    received.append((entries[~has[entries]], values[~has[entries]]))
            mover.move(here[has].to(self.device), there[has].to(self.device))
            for entries, values in received:
                mover.write(there[entries], values)


def _spread(values: torch.Tensor, nodes: Int64s, num_nodes: int) -> torch.Tensor:
    """The rows of `values` at the places `nodes` of `num_nodes` rows; the others are zero."""
    spread = values.new_zeros(num_nodes, *values.shape[1:])
    spread[torch.from_numpy(nodes).to(values.device)] = values
    return spread
