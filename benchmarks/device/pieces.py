"""What the host does, over time: the pieces of a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

OTHER = "other"
WAIT = "wait"

PIECES = (
    "schedule",
    "prepare",
    "inputs",
    "attention",
    "forward",
    "sample",
    "draft",
    WAIT,
    "update",
    OTHER,
)
"""In the order of a step. Of pieces within pieces, the innermost one counts."""


class Change(NamedTuple):
    """The host begins a piece."""

    instant: float
    piece: str


class HostPieces:
    """Records which piece of a step the host is at.

    Parameters
    ----------
    now : callable
        The clock, in seconds.

    Attributes
    ----------
    changes : list of Change
        In order; each piece lasts until the next change.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open = [OTHER]
        self.changes = [Change(now(), OTHER)]

    def begin(self, piece: str) -> None:
        """The host begins a piece."""
        self._open.append(piece)
        self.changes.append(Change(self._now(), piece))

    def end(self) -> None:
        """The host ends the piece begun last, and returns to the one around it."""
        self._open.pop()
        self.changes.append(Change(self._now(), self._open[-1]))

    def watch(self, owner: Any, name: str, piece: str) -> None:
        """Record the calls of `owner.name`; an owner without it has no such piece."""
        function = getattr(owner, name, None)
        if function is None:
            return

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.begin(piece)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        setattr(owner, name, watched)

    def watch_wait(self, begins: bool) -> None:
        """Record the waits of the host; for `SimulatedDevice.on_wait`."""
        if begins:
            self.begin(WAIT)
        else:
            self.end()

    def between(self, start: float, end: float) -> list[Change]:
        """The pieces from `start` to `end`, in order; the first one begins at `start`."""
        return cut(self.changes, start, end)


def cut(changes: Sequence[Change], start: float, end: float) -> list[Change]:
    """The part of `changes` from `start` to `end`; its first change is at `start`."""
    first = max(bisect_right(changes, start, key=lambda change: change.instant) - 1, 0)
    part = [Change(start, changes[first].piece)]
    for change in changes[first + 1 :]:
        if change.instant >= end:
            break
        part.append(change)
    return part


def seconds_by_piece(changes: Sequence[Change], end: float) -> dict[str, float]:
    """The time of each piece, in seconds, of changes that last until `end`."""
    result = dict.fromkeys(PIECES, 0.0)
    ends = [*(change.instant for change in changes[1:]), end]
    for change, until in zip(changes, ends, strict=True):
        result[change.piece] += until - change.instant
    return result
