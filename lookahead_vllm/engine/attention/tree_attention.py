"""What the attention of a device tells the model runners, whatever the device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class TreeAttention(ABC):
    """Tree attention in vLLM's attention backends on one kind of device.

    An attention group is vLLM's: layers with the same backend and the same kind of KV cache.
    """

    replaces_chains: bool
    """Whether tree attention computes all rows that decode, in place of vLLM's kernel."""
    replaces_recurrent_chains: bool
    """Whether lookahead's kernels also compute recurrent layers in steps with only chains."""

    @abstractmethod
    def register(self) -> None:
        """Replace vLLM's backends in a process that serves lookahead."""

    @abstractmethod
    def obstacle(self, group: Any, layers: Sequence[Any], cache_dtype: str) -> str | None:
        """Why the layers of a group cannot verify branching trees, or None if they can."""

    @abstractmethod
    def mover(self, kv_caches: Sequence[Any], layer: Any) -> Any:
        """What moves KV in a KV cache group; `layer` is one of its layers."""

    def merges_contexts(self, groups: Sequence[Any], layers: Sequence[Any]) -> bool:
        """Whether in graphs with trees, vLLM's kernel attends to the contexts of all rows, and tree
        attention adds the draft blocks.

        `groups` are the runner's attention groups, and `layers` theirs.
        """
        return False

    def unsupported_rows(self, groups: Sequence[Any]) -> str | None:
        """Why requests with drafts cannot share a step with others, or None if they can."""
        return None


def dtype_obstacle(layers: Sequence[Any], dtype: torch.dtype) -> str | None:
    """Why trees cannot attend to the KV of these layers: it has another dtype than the model."""
    others = {layer.kv_cache.dtype for layer in layers} - {dtype}
    return f"the KV cache holds {others.pop()}, not the model's {dtype}" if others else None
