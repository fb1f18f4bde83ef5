"""Texts that wait to be inserted: a little of each request's in turn, for a fixed time a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter

from lookahead_vllm.draft.kernel import Ints

SECONDS = 0.001
"""How long all insertions of one step may take."""

CHUNK = 256
"""Tokens of one request that are inserted before the next request has its turn: some 0.2 ms."""


@dataclass(slots=True)
class _Text:
    insert: Callable[[Ints], None]
    tokens: Ints


class InsertionQueue:
    """Inserts long texts over several steps, so that no request delays the others.

    Each request has one turn of CHUNK tokens, then the next one has its turn. A step ends at most
    one turn after its time is used up.

    Attributes
    ----------
    seconds : float
        How long all insertions of one step may take; at least one turn is taken in each step.
    clock : callable
        Returns seconds.
    """

    def __init__(self) -> None:
        self.seconds = SECONDS
        self.clock: Callable[[], float] = perf_counter
        self._used = 0.0
        self._waiting: dict[Hashable, deque[_Text]] = {}
        """By request; the next turn is the first one's."""

    def add(self, request: Hashable, insert: Callable[[Ints], None], tokens: Ints) -> None:
        """Let `insert` have `tokens` int32 [n] in pieces, after the texts of this request."""
        if len(tokens):
            self._waiting.setdefault(request, deque()).append(_Text(insert, tokens))

    def drop(self, request: Hashable) -> None:
        """The request has ended: forget what waits."""
        self._waiting.pop(request, None)

    def work(self) -> None:
        """Insert until the time of this step is used up or nothing waits."""
        while self._waiting and self._used < self.seconds:
            self._take_turn()

    def end_step(self) -> None:
        """Do the work of this step, one turn at least; the next step begins with its full time."""
        if self._waiting:
            self._take_turn()
        self.work()
        self._used = 0.0

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
        self._used += self.clock() - start
