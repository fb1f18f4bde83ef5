"""Which space of the trie belongs to which namespace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping

from lookahead_vllm.draft.trie.table import Trie, count_by_space

MAX_NAMESPACES = 1 << 16
"""The most namespaces that are remembered; when they are exceeded, a quarter is forgotten."""


def digest_of(namespace: str) -> str:
    """32 hex digits that replace a namespace's name, which may hold a secret: a cache_salt."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()


class Namespaces:
    """The shared spaces of a trie by namespace.

    When there are too many, those with the fewest n-grams in the trie are forgotten first; among
    equals, those that were named longest ago. The trie prunes n-grams that are rarely seen, so
    the number of n-grams measures both use and size, and names that were used once go before
    those in use.
    """

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._spaces: dict[str, int] = {}
        """By digest, in the order in which they were last named."""

    def space_of(self, namespace: str, live: Callable[[], Collection[int]]) -> int:
        """The space of a namespace; `live` returns the spaces that must not be forgotten."""
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
        """Replace all namespaces with those that `to_dict` returned."""
        self._spaces = {str(digest): int(space) for digest, space in spaces.items()}

    def _forget(self, live: Collection[int]) -> None:
        digests = list(self._spaces)
        sizes = count_by_space(self._trie.edges, list(self._spaces.values())).tolist()
        idle = [i for i, digest in enumerate(digests) if self._spaces[digest] not in live]
        idle.sort(key=sizes.__getitem__)  # stable: among equals, the one named first comes first
        for i in idle[: max(1, MAX_NAMESPACES // 4)]:
            del self._spaces[digests[i]]
