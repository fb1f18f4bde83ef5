"""Inserts long texts a little at a time, for a share of each step, request by request."""

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Protocol

from lookahead_vllm.draft.jit import Int32s

SHARE = 1 / 32
"""The share of a step's time that all insertions of the step may take."""

MAX_SECONDS = 0.002
"""The most time that all insertions of a step may take, in seconds."""

CHUNK_TOKENS = 64
"""Tokens of one request that are inserted in one turn, in about 50 µs."""


TURNS_LOCKED = 8
"""After so many turns in a row, other threads get the interpreter's lock. They need some 50 µs to
wake up, so `sleep(0)` takes as long as two turns."""


class Work(Protocol):
    """A text, or the rest of it."""

    def insert_chunk(self) -> bool:
        """Insert CHUNK_TOKENS tokens, or what is left; whether more are left then."""


@dataclass(slots=True)
class _Text:
    insert: Callable[[Int32s], None]
    tokens: Int32s

    @property
    def size(self) -> int:
        return max(CHUNK_TOKENS, len(self.tokens))

    def insert_chunk(self) -> bool:
        self.insert(self.tokens[:CHUNK_TOKENS])
        self.tokens = self.tokens[CHUNK_TOKENS:]
        return len(self.tokens) > 0


_ARRIVALS = object()
"""The request whose texts come from other members of a fleet."""


class InsertionQueue:
    """Inserts long texts over several steps, so that no request delays the others.

    Requests take turns of CHUNK_TOKENS tokens; all texts of other members count as one request.
    The length of a step is the time between the last two calls of `end_step`; a step inserts for a
    share of it, at least one turn, and at most one turn longer. While a device computes, `work_for`
    inserts more.
    """

    def __init__(self) -> None:
        self.share, self.seconds = SHARE, MAX_SECONDS
        """A step inserts for this share of its length, and at most for these seconds. If they are
        infinite, texts are inserted at once."""
        self.clock: Callable[[], float] = perf_counter
        self._left = self.seconds
        """Seconds left for insertions in this step."""
        self._has_inserted = False
        """Whether a turn was taken in this step."""
        self._last_end: float | None = None
        self._waiting: dict[Hashable, deque[Work]] = {}
        """By request, in the order of their turns."""
        self._arrived: deque[_Text] = deque()
        """Texts of other members that are not in `_waiting`; another thread uses it, too."""
        self.num_arrived = 0
        """Their tokens; a text counts as one turn at least, since it takes memory besides."""
        self._arrivals = threading.Lock()

    def add(self, request: Hashable, insert: Callable[[Int32s], None], tokens: Int32s) -> None:
        """Queue `tokens` int32 [n] for `insert`, in parts, after the request's earlier texts."""
        if len(tokens):
            self._waiting.setdefault(request, deque()).append(_Text(insert, tokens))

    def add_work(self, request: Hashable, work: Work) -> None:
        """Queue a text unless it is in the queue."""
        self._waiting.setdefault(request, deque([work]))

    def drop(self, request: Hashable) -> None:
        """The request has ended: remove its texts from the queue."""
        self._waiting.pop(request, None)

    def has_work(self) -> bool:
        """Whether there are texts to insert."""
        if self._arrived and _ARRIVALS not in self._waiting:
            text = self._next_arrived()
            if text is not None:
                self._waiting[_ARRIVALS] = deque([text])
        return bool(self._waiting)

    def work(self) -> None:
        """Insert until this step's time is used up or the queue is empty."""
        while self.has_work() and (self._left > 0 or self.seconds == math.inf):
            self._take_turn()

    def work_for(self, seconds: float) -> None:
        """Insert until the queue is empty or another turn, as long as the longest, would end too
        late.

        For a time in which this thread has nothing else to do; it is no part of a step's share.
        """
        now, longest = self.clock(), 0.0
        end = now + seconds
        turns = 0
        while now + longest < end and self.has_work():
            self._insert_turn()
            turns += 1
            if turns % TURNS_LOCKED == 0:
                sleep(0)
            before, now = now, self.clock()
            longest = max(longest, now - before)

    def end_step(self) -> None:
        """Insert for the rest of this step's time, at least one turn, and begin the next step."""
        if not self._has_inserted and self.has_work():
            self._take_turn()
        self.work()
        self._has_inserted = False
        now, last = self.clock(), self._last_end
        self._last_end = now
        length = math.inf if last is None else now - last
        self._left = min(self.share * length, self.seconds)

    # ---- texts of other members, from another thread ---------------------------------------------

    def arrive(self, insert: Callable[[Int32s], None], tokens: Int32s) -> None:
        """As `add`, for a text of another member."""
        text = _Text(insert, tokens)
        with self._arrivals:
            self._arrived.append(text)
            self.num_arrived += text.size

    def seconds_since_step(self) -> float:
        """The time since the last step ended."""
        return math.inf if self._last_end is None else self.clock() - self._last_end

    def insert_arrived(self) -> bool:
        """Insert a part of what has arrived, in the other thread; False if there is none.

        Kernels hold the global interpreter lock, so a step that begins waits for one part.
        """
        text = self._next_arrived()
        if text is not None and text.insert_chunk():
            with self._arrivals:
                self._arrived.appendleft(text)
                self.num_arrived += text.size
            sleep(0)  # lets a step begin
        return text is not None

    def _next_arrived(self) -> _Text | None:
        with self._arrivals:
            if not self._arrived:  # the other thread may have taken the last one
                return None
            text = self._arrived.popleft()
            self.num_arrived -= text.size
            return text

    def _take_turn(self) -> None:
        start = self.clock()
        self._insert_turn()
        self._left -= self.clock() - start
        self._has_inserted = True

    def _insert_turn(self) -> None:
        request = next(iter(self._waiting))
        works = self._waiting.pop(request)
        if not works[0].insert_chunk():
            works.popleft()
        if works:
            self._waiting[request] = works  # after all others
