"""The live requests, numbered: arrays have a row for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int64s

_INITIAL_CAPACITY = 64


class RequestRows:
    """Small numbers for live requests; one that has ended leaves its number to another."""

    def __init__(self) -> None:
        self.capacity = _INITIAL_CAPACITY
        """All numbers are below; doubled when they are used up."""
        self._numbers: dict[str, int] = {}
        self._free = list(range(self.capacity))

    def add(self, request_id: str) -> int:
        """The number of a new request."""
        if not self._free:
            self._free = list(range(self.capacity, 2 * self.capacity))
            self.capacity *= 2
        self._numbers[request_id] = number = self._free.pop()
        return number

    def pop(self, request_id: str) -> int | None:
        """The number that the request had; None for an unknown one."""
        number = self._numbers.pop(request_id, None)
        if number is not None:
            self._free.append(number)
        return number

    def numbers(self, request_ids: Iterable[str]) -> Int64s:
        """int64 [t]; KeyError for one that is unknown."""
        return np.array([self._numbers[i] for i in request_ids], np.int64)

    def numbers_or(self, request_ids: Iterable[str], nobody: int) -> Int64s:
        """int64 [t]; `nobody` for those that are unknown."""
        return np.array([self._numbers.get(i, nobody) for i in request_ids], np.int64)

    def widened(self, array: NDArray[Any]) -> NDArray[Any]:
        """`array`, with a row of zeros for every number that it has none for."""
        if len(array) == self.capacity:
            return array
        wider = np.zeros((self.capacity, *array.shape[1:]), array.dtype)
        wider[: len(array)] = array
        return wider
