"""The n-gram pool of one request, from which the candidates of each step are taken.

Source: Lookahead Decoding (Fu et al., ICML 2024), section 3.2: n-grams by their first token; at
most G of those that begin with the last token of the text are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.tree import UNKNOWN

NGram = tuple[int, ...]


MAX_NGRAMS = 16_384
"""Of a pool; some 4 MB. A larger one would make the step wait in which its request ends."""


class NGramPool:
    """At most G n-grams for each first token; the one that was added longest ago is replaced.

    If there are more than `MAX_NGRAMS`, those of the first token that was added longest ago go.

    Parameters
    ----------
    ngram_size : int
        N.
    guess_set_size : int
        G.
    """

    def __init__(self, ngram_size: int, guess_set_size: int) -> None:
        self.ngram_size = ngram_size
        self.guess_set_size = guess_set_size
        self._followers: dict[int, dict[NGram, int]] = {}
        """By first token: the source of each n-gram's other tokens, the latest added last."""
        self._size = 0

    def add(self, first: int, rest: NGram, source: int) -> None:
        """Add an n-gram: `rest` are the N - 1 tokens after `first`.

        An n-gram that is in the pool becomes the latest and keeps its source.
        """
        followers = self._followers.setdefault(first, {})
        before = len(followers)
        source = followers.pop(rest, source)
        if len(followers) == self.guess_set_size:
            del followers[next(iter(followers))]
        followers[rest] = source
        self._size += len(followers) - before
        while self._size > MAX_NGRAMS:
            oldest = next(iter(self._followers))
            self._size -= len(self._followers.pop(oldest))

    def add_text(self, tokens: Sequence[int], source: int) -> None:
        """Add all n-grams of a text that have no UNKNOWN."""
        for start in range(len(tokens) - self.ngram_size + 1):
            first, *rest = ngram = tokens[start : start + self.ngram_size]
            if UNKNOWN not in ngram:
                self.add(first, tuple(rest), source)

    def inserter(self, source: int) -> Callable[[Int32s], None]:
        """A function that adds the n-grams of a text, whose parts it receives one after another."""
        tail: list[int] = []

        def insert(tokens: Int32s) -> None:
            text = [*tail, *tokens.tolist()]
            self.add_text(text, source)
            tail[:] = text[1 - self.ngram_size :]

        return insert

    def candidates(self, first: int) -> Iterator[tuple[NGram, int]]:
        """The tokens that followed `first`, the latest added first, each with its source."""
        return reversed(self._followers.get(first, {}).items())
