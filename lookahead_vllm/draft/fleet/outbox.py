"""The pieces of this replica's answers that other replicas have not got yet."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from lookahead_vllm.draft.fleet.pieces import Pieces
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.trie.suffix import Hashes
from lookahead_vllm.draft.trie.table import NO_SPACE

MAX_TOKENS = 1 << 18
"""The most tokens that wait to be sent; after that, the oldest are dropped."""


class _Step(NamedTuple):
    """What the texts of a step have gained."""

    numbers: Int64s
    """int64 [t]: of the requests, in order of their starts."""
    spaces: Int32s
    """int32 [t]: of the namespaces."""
    hashes: Hashes
    """uint64 [t, NUM_HASHES]: of the texts before."""
    tokens: Int32s
    sizes: Int64s


class Outbox:
    """Collects steps in O(1); another thread takes them and does the rest.

    Attributes
    ----------
    dropped : int
        Tokens that were not taken in time.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._steps: deque[_Step] = deque()
        self._num_tokens = 0
        self._lock = threading.Lock()

    def add(
        self, numbers: Int64s, spaces: Int32s, hashes: Hashes, tokens: Int32s, sizes: Int64s
    ) -> None:
        """Add the new `tokens` of t texts, `sizes` each; the arrays must not change any more."""
        if not len(tokens):
            return
        with self._lock:
            self._steps.append(_Step(numbers, spaces, hashes, tokens, sizes))
            self._num_tokens += len(tokens)
            while self._num_tokens > MAX_TOKENS:
                oldest = self._steps.popleft()
                self._num_tokens -= len(oldest.tokens)
                self.dropped += len(oldest.tokens)

    def take(self) -> dict[int, Pieces]:
        """All pieces by the space of their namespace; any thread may call it.

        What one request has gained in several steps is one piece.
        """
        with self._lock:
            steps, self._steps, self._num_tokens = self._steps, deque(), 0
        if not steps:
            return {}
        numbers, spaces, hashes, tokens, sizes = map(np.concatenate, zip(*steps, strict=True))
        has_new = sizes > 0
        numbers, spaces, hashes = numbers[has_new], spaces[has_new], hashes[has_new]
        sizes = sizes[has_new]
        order = np.argsort(numbers, kind="stable")
        # The tokens in the same order: those of a request one after another.
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        tokens = tokens[np.argsort(np.repeat(place, sizes), kind="stable")]
        firsts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        sizes = np.add.reduceat(sizes[order], firsts)
        spaces, hashes = spaces[order[firsts]], hashes[order[firsts]]
        owners = np.repeat(spaces, sizes)
        return {
            int(space): Pieces(
                hashes[spaces == space], sizes[spaces == space], tokens[owners == space]
            )
            for space in np.unique(spaces)
            if space != NO_SPACE
        }
