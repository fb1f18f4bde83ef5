"""M-RoPE positions of draft trees on vLLM's second model runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.mm.rope import RopeState


class NodeRopeState(RopeState):
    """vLLM's state of M-RoPE positions, which shifts the nodes of a step's trees.

    The positions of an answer are one range in all dimensions, so a node that is moved to its depth
    is moved by the same shift in every dimension.
    """

    shifts: tuple[torch.Tensor, torch.Tensor] | None = None
    """For the step that is being prepared, if its trees branch: indices of nodes among its tokens,
    and the shifts of their positions; both int64 [n]."""

    def prepare_positions(self, *args: Any, **kwargs: Any) -> None:
        super().prepare_positions(*args, **kwargs)
        shifts, self.shifts = self.shifts, None
        if shifts is not None:
            tokens, added = shifts
            self.positions[:, tokens] += added
