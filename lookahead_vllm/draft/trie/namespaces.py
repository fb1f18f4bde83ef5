"""Which space of the trie belongs to which namespace."""

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping

import numpy as np

from lookahead_vllm.draft.trie.table import NO_SPACE, Trie, count_by_space

MAX_NAMESPACES = 1 << 16
"""The most namespaces that are remembered; when they are exceeded, a quarter is forgotten."""

SAMPLED_EDGES = 1 << 19
"""The edges by which namespaces are compared when some are forgotten; reading all would stop every
request for a second in a large trie. A shared space has its edges all over the table."""


def digest_of(namespace: str) -> str:
    """32 hex digits that replace a namespace's name, which may hold a secret: a cache_salt."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()


class Namespaces:
    """The shared spaces of a trie by namespace.

    When there are too many, those with the fewest n-grams in a part of the trie are forgotten
    first; among equals, those that were named longest ago. The trie prunes n-grams that are rarely
    seen, so the number of n-grams measures both use and size, and names that were used once go
    before those in use.
    """

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._spaces: dict[str, int] = {}
        """By digest, in the order in which they were last named."""
        self._lock = threading.Lock()
        """Held while `_spaces` is used: another thread saves it."""

    def space_of(self, digest: str, live: Callable[[], Collection[int]]) -> int:
        """The space of a namespace, NO_SPACE if there are no more numbers for spaces.

        `digest` is that of its name; `live` returns the spaces that must not be forgotten.
        """
        with self._lock:
            space = self._spaces.pop(digest, None)
            if space is None:
                if len(self._spaces) >= MAX_NAMESPACES:
                    self._forget(live())
                space = self._trie.new_shared()
            if space != NO_SPACE:
                self._spaces[digest] = space
        return space

    def to_dict(self) -> dict[str, int]:
        """Spaces by digest. Any thread may call it."""
        with self._lock:
            return dict(self._spaces)

    def restore(self, spaces: Mapping[str, int]) -> None:
        """Replace all namespaces with those that `to_dict` returned."""
        with self._lock:
            self._spaces = {str(digest): int(space) for digest, space in spaces.items()}

    def _forget(self, live: Collection[int]) -> None:
        digests = list(self._spaces)
        spaces = np.fromiter(self._spaces.values(), np.int64, len(digests))
        sizes = count_by_space(self._trie.answers[-SAMPLED_EDGES:], spaces)
        idle = np.flatnonzero(~np.isin(spaces, np.array(list(live), np.int64)))
        smallest = idle[np.argsort(sizes[idle], kind="stable")]
        for i in smallest[: max(1, MAX_NAMESPACES // 4)].tolist():
            del self._spaces[digests[i]]
