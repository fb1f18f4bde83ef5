"""Moves of K/V between cache slots, which make the slots of an accepted path contiguous."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class SlotMover(ABC):
    """Copies slots in the caches of all layers that share one block table.

    A slot is `block * block_size + offset`. The caches must not be reallocated.
    """

    @abstractmethod
    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy the K/V of slot `src[i]` to slot `dst[i]` in every layer.

        The moves of a request must be in ascending order of `src`, each to a `dst` below its `src`,
        because implementations differ: they copy one slot after the other, or read all slots first.
        Moves of a slot to itself may be anywhere; they are dropped.

        Parameters
        ----------
        src, dst : int64 [m], on the CPU or on the caches' device
        """

    @abstractmethod
    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        """As `move`, for the accepted paths of r requests, which share no slots.

        `src` and `dst`, int64 [r, width] on the caches' device, are the slots of `origins` and
        `targets` of a `walk.Walk`.
        """

    def read(self, slots: Tensor) -> Tensor:
        """The contents of these slots, int64 [m], in all layers: uint8 [m, bytes of a slot]."""
        parts = [view[place] for view, place in self._places(slots)]
        return torch.cat([part.reshape(len(slots), -1).view(torch.uint8) for part in parts], dim=1)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Overwrite these slots, int64 [m], with the result of `read` of a cache like this one."""
        start = 0
        for view, place in self._places(slots):
            part = view[place]
            end = start + part[:1].numel() * part.element_size()
            own = values[:, start:end].contiguous().view(part.dtype)
            view[place] = own.view(part.shape)
            start = end

    @abstractmethod
    def _places(self, slots: Tensor) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        """Views of all caches, and the index of the slots in each of them."""
