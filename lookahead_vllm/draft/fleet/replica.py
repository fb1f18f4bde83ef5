"""A proposer's side of the exchange: what it sends, what it follows, and what has arrived."""

from __future__ import annotations

from collections import deque

import numpy as np

from lookahead_vllm.draft.fleet.outbox import Outbox
from lookahead_vllm.draft.fleet.pieces import PieceInserter, Pieces
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.trie.namespaces import MAX_NAMESPACES, digest_of
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.draft.trie.suffix import Hashes, empty_hashes
from lookahead_vllm.draft.trie.table import NO_SPACE

MAX_WAITING_TOKENS = 1 << 18
"""No more is read from the server while so many tokens wait to be inserted."""

NOTHING_READ = "0-0"

IDLE_SECONDS = 0.2
"""If no step has ended for so long, the thread of the exchange inserts what has arrived."""


class Replica:
    """A proposer's place in a fleet; see `Fleet` in `trie/proposer.py`.

    The thread that runs steps calls `follow` and `send`. Another one calls the rest. From the
    start, the default namespace is followed, and those that the proposer's snapshot followed.

    Attributes
    ----------
    outbox : Outbox
    followed : dict of str to str
        The namespaces whose messages are read, by digest: the id of the last message that was
        read, or NOTHING_READ.
    new : deque of str
        Those of them whose latest messages the other thread has to read, whatever was read before.
    """

    def __init__(self, proposer: NGramTrieProposer) -> None:
        self.outbox = Outbox()
        self.followed: dict[str, str] = {}
        self.new: deque[str] = deque(maxlen=MAX_NAMESPACES)
        self._trie, self._insertion = proposer.trie, proposer.insertion
        self._spaces: dict[str, int] = {}
        self._digests: dict[int, str] = {}
        for digest, position in proposer.followed.items():
            self.follow(digest, proposer.shared_space(digest), position)
        self.follow(digest_of(""), proposer.shared_space(digest_of("")))
        proposer.fleet = self
        # Compiles the kernel, so that no step waits for the compiler.
        nothing = Pieces(empty_hashes()[None], np.ones(1, np.int64), np.zeros(1, np.int32))
        PieceInserter(proposer.trie, NO_SPACE, nothing)(nothing.tokens)

    def send(
        self, numbers: Int64s, spaces: Int32s, hashes: Hashes, tokens: Int32s, sizes: Int64s
    ) -> None:
        """See Fleet."""
        self.outbox.add(numbers, spaces, hashes, tokens, sizes)

    def follow(self, digest: str, space: int, position: str | None = None) -> None:
        """See Fleet. Read the namespace's messages from now on.

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
        """See Fleet. Any thread may call it."""
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
        """Insert these pieces of another replica, when steps have time for it."""
        space = self._spaces.get(digest)
        if space is not None:
            inserter = PieceInserter(self._trie, space, pieces)
            self._insertion.arrive(inserter, pieces.tokens)

    def insert_if_idle(self) -> None:
        """Insert what has arrived if no steps run."""
        while self._insertion.seconds_since_step() > IDLE_SECONDS:
            if not self._insertion.insert_arrived():
                return
