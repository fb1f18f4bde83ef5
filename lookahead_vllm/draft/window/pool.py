"""The n-gram pool of one request, and the candidates that it gives a step.

Source: Lookahead Decoding (Fu et al., ICML 2024), section 3.2: n-grams filed under their first
token; those that begin with the last token of the text are verified, at most G of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.tree import UNKNOWN

NGram = tuple[int, ...]


class NGramPool:
    """At most G n-grams for each first token; the one that was not met for longest goes.

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

    def add(self, first: int, rest: NGram, source: int) -> None:
        """Meet an n-gram: N - 1 tokens after `first`. A source's number stays with it."""
        followers = self._followers.setdefault(first, {})
        source = followers.pop(rest, source)
        if len(followers) == self.guess_set_size:
            del followers[next(iter(followers))]
        followers[rest] = source

    def add_text(self, tokens: Sequence[int], source: int) -> None:
        """Meet all n-grams of a text that have no UNKNOWN."""
        for start in range(len(tokens) - self.ngram_size + 1):
            first, *rest = ngram = tokens[start : start + self.ngram_size]
            if UNKNOWN not in ngram:
                self.add(first, tuple(rest), source)

    def inserter(self, source: int) -> Callable[[Int32s], None]:
        """A function that meets the n-grams of a text, which it is given in pieces."""
        tail: list[int] = []

        def insert(tokens: Int32s) -> None:
            text = [*tail, *tokens.tolist()]
            self.add_text(text, source)
            tail[:] = text[1 - self.ngram_size :]

        return insert

    def candidates(self, first: int) -> Iterator[tuple[NGram, int]]:
        """What followed that token, the latest met first, each with its source."""
        return reversed(self._followers.get(first, {}).items())


def as_rows(chains: Sequence[NGram], width: int) -> Int32s:
    """int32 [c, width]: a row for each, -1 behind the shorter ones."""
    rows = np.full((len(chains), width), -1, np.int32)
    for row, tokens in zip(rows, chains, strict=True):
        row[: len(tokens)] = tokens
    return rows
