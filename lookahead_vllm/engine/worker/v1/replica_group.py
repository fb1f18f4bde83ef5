"""The ranks of lookahead parallelism: how a worker becomes one, and what ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_world_group, init_model_parallel_group

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.engine import config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def become_replica(vllm_config: VllmConfig) -> None:
    """Restore tensor_parallel_size in this worker's config.

    Weights are split only within a replica; see `ReplicaExecutor`.
    """
    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size //= config.options_of(vllm_config).parallel


class ReplicaGroup:
    """The ranks, one from each replica, that exchange what they sampled.

    Attributes
    ----------
    size, rank : int
        The number of replicas, and the index of this rank's replica.
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
