"""Pipeline stages before the last one, on Model Runner V2: they keep what accepted nodes left.

Only the last stage samples. vLLM broadcasts the tokens of a step from there, and the other stages
read them before the next step that has the same requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker.gpu.input_batch import InputBatch

from lookahead_vllm.engine.recurrent.states import StatePlaces
from lookahead_vllm.verify.layout.node_layout import NodeLayout
from lookahead_vllm.verify.transfer import to_device
from lookahead_vllm.verify.walk import walk


class ComputedTrees(NamedTuple):
    """The trees of a step whose tokens have not arrived, as n rows of r requests."""

    ids: torch.Tensor
    """[n]: the token of each row."""
    layout: NodeLayout
    ends: torch.Tensor
    """int32 [r + 1]: the first row of each request, then n."""
    owners: torch.Tensor
    """int64 [n]: the request of each row."""
    slots: torch.Tensor
    """[groups, n]: the KV slot of each row, for each KV cache group."""
    states: Mapping[int, StatePlaces]
    """Of each KV cache group of recurrent layers, where the requests' states are."""

    @classmethod
    def of(
        cls,
        layout: NodeLayout,
        batch: InputBatch,
        slots: torch.Tensor,
        states: Mapping[int, StatePlaces] = MappingProxyType({}),
    ) -> ComputedTrees:
        """`slots` has those of all tokens of the step; all of these are copied."""
        sizes = np.diff(batch.cu_num_logits_np)
        owners = np.repeat(np.arange(len(sizes)), sizes)
        rows = batch.logits_indices
        return cls(
            batch.input_ids[rows],
            layout,
            batch.cu_num_logits,
            to_device(owners, slots.device),
            slots[:, rows],
            {group: StatePlaces(*(part.clone() for part in own)) for group, own in states.items()},
        )

    def move(self, movers: Sequence[Any], tokens: torch.Tensor, freed: NDArray[np.bool_]) -> None:
        """Move the accepted nodes' KV to the slots right after the root's, and their states.

        Parameters
        ----------
        movers
            As in `kv_movers`: None for a group of layers that are all on other stages.
        tokens : int64 [r, w]
            What each request has emitted.
        freed : bool [r]
            Requests that have ended meanwhile; other requests may own their blocks.
        """
        tokens = tokens.masked_fill(to_device(freed, tokens.device)[:, None], -1)
        # A node is accepted if the tokens on its path are the first ones that were emitted.
        sampled = tokens[self.owners, self.layout.depths.long()]
        rows = torch.arange(len(sampled), device=sampled.device)
        path = walk(self.ids, sampled, self.layout.parents, self.ends, rows, self.layout.width)
        for group, (mover, own) in enumerate(zip(movers, self.slots, strict=True)):
            if group in self.states:
                mover.commit(self.states[group], path, self.ends)
            elif mover is not None:
                mover.move_paths(own[path.origins], own[path.targets])
