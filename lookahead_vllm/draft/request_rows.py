"""Which row of an array belongs to which live request."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int64s

_INITIAL_CAPACITY = 64


class RequestRows:
    """Maps the id of each live request to a row; rows of ended requests are used again."""

    def __init__(self) -> None:
        self.capacity = _INITIAL_CAPACITY
        """The number of rows, doubled when all are used."""
        self._rows: dict[str, int] = {}
        self._free = list(range(self.capacity))

    def add(self, request_id: str) -> int:
        """Assign a row to a new request and return it."""
        if not self._free:
            self._free = list(range(self.capacity, 2 * self.capacity))
            self.capacity *= 2
        self._rows[request_id] = row = self._free.pop()
        return row

    def pop(self, request_id: str) -> int | None:
        """Release the row of a request and return it; None for an unknown request."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def row_of(self, request_id: str) -> int:
        """The row of a request; KeyError for an unknown one."""
        return self._rows[request_id]

    def rows_of(self, request_ids: Iterable[str]) -> Int64s:
        """The row of each request, int64 [t]; KeyError for an unknown one."""
        return np.array([self._rows[i] for i in request_ids], np.int64)

    def rows_or(self, request_ids: Iterable[str], missing: int) -> Int64s:
        """The row of each request, int64 [t]; `missing` for unknown ones."""
        return np.array([self._rows.get(i, missing) for i in request_ids], np.int64)

    def resized(self, array: NDArray[Any]) -> NDArray[Any]:
        """`array` itself if it has `capacity` rows, else a copy with rows of zeros appended."""
        if len(array) == self.capacity:
            return array
        larger = np.zeros((self.capacity, *array.shape[1:]), array.dtype)
        larger[: len(array)] = array
        return larger
