"""Texts that wait to be inserted: a little of each request's in turn, for a share of each step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter

from lookahead_vllm.draft.jit import Int32s

SHARE = 1 / 16
"""The part of a step's time that all insertions of the step may take together."""

SECONDS = 0.002
"""And the most that they may take, however long the step is."""

CHUNK = 64
"""Tokens of one request that are inserted before the next request has its turn: some 50 µs."""


@dataclass(slots=True)
class _Text:
    insert: Callable[[Int32s], None]
    tokens: Int32s


class InsertionQueue:
    """Inserts long texts over several steps, so that no request delays the others.

    Each request has one turn of CHUNK tokens, then the next one has its turn. How long a step is,
    is told by the time between the last two calls of `end_step`. A step inserts for its share of
    that, and at most one turn longer.

    Attributes
    ----------
    share, seconds : float
        Bounds for the time of all insertions of one step; at least one turn is taken in each. If
        `seconds` is infinite, texts are inserted at once.
    clock : callable
        Returns seconds.
    """

    def __init__(self) -> None:
        self.share, self.seconds = SHARE, SECONDS
        self.clock: Callable[[], float] = perf_counter
        self._left = self.seconds
        """Of this step's time."""
        self._has_inserted = False
        """In this step."""
        self._last_end: float | None = None
        self._waiting: dict[Hashable, deque[_Text]] = {}
        """By request; the next turn is the first one's."""

    def add(self, request: Hashable, insert: Callable[[Int32s], None], tokens: Int32s) -> None:
        """Let `insert` have `tokens` int32 [n] in pieces, after the texts of this request."""
        if len(tokens):
            self._waiting.setdefault(request, deque()).append(_Text(insert, tokens))

    def drop(self, request: Hashable) -> None:
        """The request has ended: forget what waits."""
        self._waiting.pop(request, None)

    def work(self) -> None:
        """Insert until the time of this step is used up or nothing waits."""
        while self._waiting and (self._left > 0 or self.seconds == math.inf):
            self._take_turn()

    def end_step(self) -> None:
        """Do the work of this step, one turn at least; the next step begins with its full time."""
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
        text.insert(text.tokens[:CHUNK])
        text.tokens = text.tokens[CHUNK:]
        if not len(text.tokens):
            texts.popleft()
        if texts:
            self._waiting[request] = texts  # behind all others
        self._left -= self.clock() - start
        self._has_inserted = True
