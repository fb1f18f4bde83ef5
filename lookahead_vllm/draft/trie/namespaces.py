"""Which space of the trie belongs to which namespace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping

from lookahead_vllm.draft.trie.table import Trie, count_by_space

MAX_NAMESPACES = 1 << 16
"""Names that are remembered; beyond it, the least used quarter is forgotten."""


def digest_of(namespace: str) -> str:
    """32 hex digits that stand for a namespace: its name may hold a cache_salt, a secret."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()


class Namespaces:
    """The shared spaces of a trie by namespace.

    A name is forgotten by what it holds: those with the fewest n-grams in the trie first, and of
    equally many those that no request named for longest. The trie prunes what is seldom seen, so
    that its n-grams measure use and size at once, and names that were made up once and thrown away
    go before any that is in use.
    """

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._spaces: dict[str, int] = {}
        """By digest; the one that was named last stands last."""

    def space_of(self, namespace: str, live: Callable[[], Collection[int]]) -> int:
        """The space of a namespace; `live` returns those that must not be forgotten now."""
        digest = digest_of(namespace)
        space = self._spaces.pop(digest, None)
        if space is None:
            if len(self._spaces) >= MAX_NAMESPACES:
                self._forget(live())
            space = self._trie.new_shared()
        self._spaces[digest] = space
        return space

    def to_dict(self) -> dict[str, int]:
        """Spaces by digest."""
        return dict(self._spaces)

    def restore(self, spaces: Mapping[str, int]) -> None:
        """Go on from what `to_dict` returned."""
        self._spaces = {str(digest): int(space) for digest, space in spaces.items()}

    def _forget(self, live: Collection[int]) -> None:
        digests = list(self._spaces)
        sizes = count_by_space(self._trie.edges, list(self._spaces.values())).tolist()
        idle = [i for i, digest in enumerate(digests) if self._spaces[digest] not in live]
        idle.sort(key=sizes.__getitem__)  # stable: of equals, the one named first comes first
        for i in idle[: max(1, MAX_NAMESPACES // 4)]:
            del self._spaces[digests[i]]
