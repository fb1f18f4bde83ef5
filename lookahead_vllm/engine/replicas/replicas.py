"""The ranks of lookahead parallelism: how a worker becomes one, and what ranks exchange.

Source: Lookahead Decoding (ICML 2024), section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group, init_model_parallel_group
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.parts import ForestParts
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine import config
from lookahead_vllm.engine.grammar.tree_walk import joined_masks, split_masks
from lookahead_vllm.verify.choices import Choices, pack_choices


def become_replica(vllm_config: VllmConfig) -> None:
    """Restore tensor_parallel_size in this worker's config.

    Weights are split only within a replica; see `ReplicaExecutor`.
    """
    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size //= config.options_of(vllm_config).parallel


class ReplicaGroup:
    """The ranks, one from each of `size` replicas, that exchange what they sampled."""

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
        """The arrays int32 [sizes[rank], w] of all ranks, in order; `own` is this rank's."""
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


def is_verified_whole(params: SamplingParams | None) -> bool:
    """Whether every rank verifies all nodes of a request's draft.

    The first rank returns the logprobs of accepted nodes, and all ranks need their thinking
    budgets.
    """
    return params is not None and (
        params.logprobs is not None
        or bool(params.logprob_token_ids)
        or params.thinking_token_budget is not None
    )


def masks_of_part(
    grammar: GrammarOutput, forest: DraftForest, req_ids: Sequence[str], contains: NDArray[np.bool_]
) -> GrammarOutput:
    """The masks of the nodes of one part, which are `contains` bool [n]; `req_ids` have a tree."""
    own = {
        req_id: contains[forest.firsts[tree] : forest.firsts[tree + 1]]
        for tree, req_id in enumerate(req_ids)
    }
    masked = grammar.structured_output_request_ids
    no_nodes = np.empty(0, np.bool_)
    kept = [own.get(req_id, no_nodes) for req_id in masked]
    masks = split_masks(grammar, [len(nodes) for nodes in kept])
    return joined_masks(
        masked,
        [
            mask[: 1 + len(nodes)][np.append(True, nodes)]
            for mask, nodes in zip(masks, kept, strict=True)
        ],
        [int(nodes.sum()) for nodes in kept],
    )


def own_choices(logits: torch.Tensor, num_choices: int) -> Choices:
    """The model's choices at each row of the logits; without columns if none are needed."""
    if num_choices:
        return Choices.on_host(pack_choices(logits, num_choices))
    none = len(logits), 0
    return Choices(np.empty(none, np.int32), np.empty(none, np.float32))


class SampledEverywhere(NamedTuple):
    """The tokens sampled on all ranks, in rows as if one rank had the logits of all nodes."""

    at_roots: Int32s
    """int32 [r]: a token for each request of the batch."""
    at_nodes: Int32s
    """int32 [n]: a token for each node of all trees."""
    choices: Choices
    """The model's choices at each of the r + n rows; without columns if the proposer needs none."""
    starts: Int64s
    """int64 [r + 1]: the first of these rows of each request, then r + n."""


def exchange(
    group: ReplicaGroup,
    forest: DraftForest,
    rows: Int64s,
    parts: ForestParts,
    req_ids: Sequence[str],
    sampled: Int32s,
    choices: Choices,
) -> SampledEverywhere:
    """Exchange tokens: what each rank sampled at its nodes, and the first rank at the roots.

    Parameters
    ----------
    forest, rows : int64 [t]
        The trees of all ranks, and the row of this rank's batch of each tree's request.
    req_ids
        The requests of this rank's batch. Ranks may have them in different orders.
    sampled : int32 [m]
        The token at each row of this rank's logits, of which there are also the `choices`.
    """
    owners, contains = parts
    all_nodes = np.zeros(len(req_ids), np.int64)
    all_nodes[rows] = forest.sizes
    # Rows as if this rank had the logits of all nodes.
    starts = np.append(0, np.cumsum(1 + all_nodes))
    roots = starts[:-1]
    nodes = roots[rows][forest.owners] + 1 + forest.places
    here = np.sort(np.concatenate([roots, nodes[contains[group.rank]]]))
    k = choices.tokens.shape[1]
    every = np.empty((len(roots) + len(nodes), 1 + 2 * k), np.int32)
    every[here, 0] = sampled
    every[here, 1 : 1 + k] = choices.tokens
    every[here, 1 + k :] = choices.gaps.view(np.int32)
    by_id = np.array(sorted(range(len(req_ids)), key=req_ids.__getitem__))
    sent = [nodes[owners == rank] for rank in range(group.size)]
    sent[0] = np.concatenate([roots[by_id], sent[0]])
    received = group.gather(every[sent[group.rank]], [len(i) for i in sent])
    for places, values in zip(sent, received, strict=True):
        every[places] = values
    return SampledEverywhere(
        every[roots, 0],
        every[nodes, 0],
        Choices(every[:, 1 : 1 + k].copy(), every[:, 1 + k :].copy().view(np.float32)),
        starts,
    )


class AcceptedKV(NamedTuple):
    """Where the KV of m accepted nodes is on a rank, in the order of the paths."""

    trees: Int64s
    """int64 [m]: the tree of each node."""
    has: NDArray[np.bool_]
    """bool [m]: whether this rank has computed it."""
    origins: Int64s
    """int64 [m]: how far after the root's its KV is; as `targets` if this rank has it not."""
    targets: Int64s
    """int64 [m]: how far after the root's it belongs."""
    senders: Int64s
    """int64 [m]: a rank that has it, and all nodes before it; -1 if no rank lacks it."""

    @classmethod
    def of(cls, forest: DraftForest, parts: ForestParts, paths: Int32s, rank: int) -> AcceptedKV:
        """`paths` are those of `accepted_paths`."""
        trees, depths = np.nonzero(paths >= 0)
        owners, contains = parts
        nodes = forest.firsts[trees] + paths[trees, depths]
        has = contains[rank][nodes]
        places = np.full(forest.num_nodes, -1)
        places[contains[rank]] = forest.keep(contains[rank]).places
        # The owner of a path's last node has the whole path.
        last = np.cumsum((paths >= 0).sum(axis=1))[trees] - 1
        return cls(
            trees,
            has,
            1 + np.where(has, places[nodes], depths),
            1 + depths,
            np.where(np.all(contains[:, nodes], axis=0), -1, owners[nodes[last]]),
        )


def move_and_send(
    group: ReplicaGroup,
    movers: Sequence[Any],
    slots: Callable[[int, Int64s], torch.Tensor],
    origins: Int64s,
    targets: Int64s,
    has: NDArray[np.bool_],
    senders: Int64s,
) -> None:
    """Move the KV of m tokens to their targets on ranks that have it; send it to the others.

    Parameters
    ----------
    slots
        Returns the KV slots of a group at positions int64 [m].
    origins, targets : int64 [m]
        Positions. KV that this rank receives is written to its target.
    has : bool [m]
        Whether this rank has the token's KV.
    senders : int64 [m]
        The rank that sends it, or -1.
    """
    if (senders < 0).all() and (origins == targets)[has].all():
        return
    for index, mover in enumerate(movers):
        here, there = slots(index, origins), slots(index, targets)
        received = []
        for sender in range(group.size):
            entries = np.flatnonzero(senders == sender)
            if len(entries):
                values = mover.read(here[entries])  # a receiver reads what it overwrites
                group.broadcast(values, sender)
                received.append((entries[~has[entries]], values[~has[entries]]))
        mover.move(here[has], there[has])
        for entries, values in received:
            mover.write(there[entries], values)
