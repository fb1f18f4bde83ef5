"""Inserts long texts a little at a time, for a share of each step, request by request."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter

from lookahead_vllm.draft.jit import Int32s

SHARE = 1 / 32
"""The share of a step's time that all insertions of the step may take."""

MAX_SECONDS = 0.002
"""The most time that all insertions of a step may take, in seconds."""

CHUNK_TOKENS = 64
"""Tokens of one request that are inserted in one turn, in about 50 µs."""


@dataclass(slots=True)
class _Text:
    insert: Callable[[Int32s], None]
    tokens: Int32s


class InsertionQueue:
    """Inserts long texts over several steps, so that no request delays the others.

    Requests take turns of CHUNK_TOKENS tokens. The length of a step is the time between the last
    two calls of `end_step`; a step inserts for a share of it, and at most one turn longer.

    Attributes
    ----------
    share, seconds : float
        Bounds for the time of a step's insertions: a share of the step's length, and seconds. A
        step takes at least one turn. If `seconds` is infinite, texts are inserted at once.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self) -> None:
        self.share, self.seconds = SHARE, MAX_SECONDS
        self.clock: Callable[[], float] = perf_counter
        self._left = self.seconds
        """Seconds left for insertions in this step."""
        self._has_inserted = False
        """Whether a turn was taken in this step."""
        self._last_end: float | None = None
        self._waiting: dict[Hashable, deque[_Text]] = {}
        """By request, in the order of their turns."""

    def add(self, request: Hashable, insert: Callable[[Int32s], None], tokens: Int32s) -> None:
        """Queue `tokens` int32 [n] for `insert`, in parts, after the request's earlier texts."""
        if len(tokens):
            self._waiting.setdefault(request, deque()).append(_Text(insert, tokens))

    def drop(self, request: Hashable) -> None:
        """The request has ended: remove its texts from the queue."""
        self._waiting.pop(request, None)

    def work(self) -> None:
        """Insert until this step's time is used up or the queue is empty."""
        while self._waiting and (self._left > 0 or self.seconds == math.inf):
            self._take_turn()

    def end_step(self) -> None:
        """Insert for the rest of this step's time, at least one turn, and begin the next step."""
        if self._waiting and not self._has_inserted:
            self._take_turn()
        self.work()
        self._has_inserted = False
        now, last = self.clock(), self._last_end
        self._last_end = now
        length = math.inf if last is None else now - last
        self._left = min(self.share * length, self.seconds)

    def _take_turn(self) -> None:
        start = self.clock()
        request = next(iter(self._waiting))
        texts = self._waiting.pop(request)
        text = texts[0]
        text.insert(text.tokens[:CHUNK_TOKENS])
        text.tokens = text.tokens[CHUNK_TOKENS:]
        if not len(text.tokens):
            texts.popleft()
        if texts:
            self._waiting[request] = texts  # after all others
        self._left -= self.clock() - start
        self._has_inserted = True
