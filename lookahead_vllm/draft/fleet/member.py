"""A proposer's side of the exchange: what it sends, what it follows, and what has arrived."""

import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from lookahead_vllm.draft.fleet.pieces import Pieces, inserter
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.trie.namespaces import MAX_NAMESPACES, digest_of
from lookahead_vllm.draft.trie.suffix import Hashes, empty_hashes
from lookahead_vllm.draft.trie.table import NO_SPACE

MAX_WAITING_TOKENS = 1 << 18
"""No more is read from the server while so many tokens wait to be inserted."""

MAX_UNSENT_TOKENS = 1 << 18
"""The most tokens that wait to be sent; after that, the oldest are dropped."""

NOTHING_READ = "0-0"

IDLE_SECONDS = 0.2
"""If no step has ended for so long, the thread of the exchange inserts what has arrived."""


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
    """Collects steps in O(1); another thread takes them and does the rest."""

    def __init__(self) -> None:
        self.dropped = 0
        """Tokens that were not taken in time."""
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
            while self._num_tokens > MAX_UNSENT_TOKENS:
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


class Member:
    """A proposer's place in a fleet; see `Fleet` in `draft/proposers/ngram_trie.py`.

    The thread that runs steps calls `follow` and `send`. Another one calls the rest. From the
    start, the default namespace is followed, and those that the proposer's snapshot followed.
    """

    def __init__(self, proposer: NGramTrieProposer) -> None:
        self.outbox = Outbox()
        self.send = self.outbox.add
        self.followed: dict[str, str] = {}
        """The namespaces whose messages are read, by digest: the id of the last message that was
        read, or NOTHING_READ."""
        self.new: deque[str] = deque(maxlen=MAX_NAMESPACES)
        """Those whose latest messages the other thread has to read, whatever was read before."""
        self._trie, self._insertion = proposer.trie, proposer.insertion
        self._spaces: dict[str, int] = {}
        self._digests: dict[int, str] = {}
        for digest, position in proposer.followed.items():
            self.follow(digest, proposer.shared_space(digest), position)
        self.follow(digest_of(""), proposer.shared_space(digest_of("")))
        proposer.fleet = self
        # Compiles the kernel, so that no step waits for the compiler.
        nothing = Pieces(empty_hashes()[None], np.ones(1, np.int64), np.zeros(1, np.int32))
        inserter(proposer.trie, NO_SPACE, nothing)(nothing.tokens)

    def follow(self, digest: str, space: int, position: str | None = None) -> None:
        """Read the namespace's messages from now on.

        `position` is the id of the last message that was read, if the namespace is not followed.
        """
        before = self._spaces.get(digest)
        if before == space:
            return
        self._digests.pop(before or space, None)
        self._spaces[digest], self._digests[space] = space, digest
        if digest in self.followed:
            return
        self.followed[digest] = position or NOTHING_READ
        if position is None:
            self.new.append(digest)
        if len(self.followed) > MAX_NAMESPACES:
            oldest = next(iter(self.followed))
            del self.followed[oldest]
            self._digests.pop(self._spaces.pop(oldest, NO_SPACE), None)

    def positions(self) -> dict[str, str]:
        """How far the messages of each namespace were read; the last ones may still wait for their
        insertion. Any thread may call it."""
        return self.followed.copy()

    def take(self) -> dict[str, Pieces]:
        """What was not sent yet, by the digest of its namespace."""
        taken = self.outbox.take()
        named = [(self._digests.get(space), pieces) for space, pieces in taken.items()]
        return {digest: pieces for digest, pieces in named if digest is not None}

    @property
    def has_room(self) -> bool:
        """Whether more messages may be put."""
        return self._insertion.num_arrived < MAX_WAITING_TOKENS

    def put(self, digest: str, pieces: Pieces) -> None:
        """Insert these pieces of another member, when steps have time for it."""
        space = self._spaces.get(digest)
        if space is not None:
            self._insertion.arrive(inserter(self._trie, space, pieces), pieces.tokens)

    def insert_if_idle(self) -> None:
        """Insert what has arrived if no steps run."""
        while self._insertion.seconds_since_step() > IDLE_SECONDS:
            if not self._insertion.insert_arrived():
                return
