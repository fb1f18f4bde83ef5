"""What is in a cache file, for people."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.trie.acceptance_rate import HITS, TRIALS, AcceptanceRate
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.draft.trie.suffix import ORDERS, row_of
from lookahead_vllm.draft.trie.table import Trie, counts_of, spaces_of

MOST_NAMESPACES = 20  # that are listed
MOST_NGRAMS = 20  # that are shown of a namespace
LONGEST = 32  # tokens of one that is shown

Decode = Callable[[list[int]], str]


class Ngram(NamedTuple):
    """Tokens that follow each other, and how often the rarest step of them was taken."""

    tokens: list[int]
    times: int


def describe(
    path: Path, tokenizer: str | None = None, vocab_size: int = 0, decode: Decode | None = None
) -> str:
    """A report on the file, of several lines; with `decode`, also on its most frequent n-grams.

    `tokenizer` is the fingerprint that the file must have, if given.

    Raises
    ------
    CacheFileError, OSError
        It is no whole cache file, or cannot be read.
    """
    header = cache_file.read_header(path)
    arrays, facts = cache_file.load(path, tokenizer)
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=len(arrays["edges"])))
    proposer.restore(arrays, facts)

    edges = arrays["edges"]
    spaces = spaces_of(edges)
    held = spaces > 0
    total = int(held.sum())
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.created))
    lines = [
        f"{path}: {path.stat().st_size / 1e6:.1f} MB, whole",
        f"made        {made}, by lookahead-vllm {header.release}",
        f"tokenizer   {header.tokenizer}",
        f"n-grams     {total} of at most {len(edges)} ({total / len(edges):.1%}); "
        f"{proposer.trie.num_pruned} were pruned so far",
        f"seen        {_histogram(counts_of(edges)[held])}",
        f"rates       {_rates(arrays['trials'], AcceptanceRate().trials)}",
        f"namespaces  {header.namespaces}",
    ]
    sizes = dict(zip(*np.unique(spaces[held], return_counts=True), strict=True))
    names = sorted(facts["namespaces"].items(), key=lambda item: -sizes.get(item[1], 0))
    for digest, space in names[:MOST_NAMESPACES]:
        name = "   (the one without a name)" if digest == digest_of("") else ""
        lines.append(f"  {digest}  {sizes.get(space, 0):>10} n-grams{name}")
    if len(names) > MOST_NAMESPACES:
        lines.append(f"  and {len(names) - MOST_NAMESPACES} smaller ones")
    if decode is not None:
        for digest, space in names[:3]:
            lines += ["", f"most frequent in {digest}:"]
            lines += [
                f"  {ngram.times:>6} x {decode(ngram.tokens)!r}"
                for ngram in frequent_ngrams(proposer.trie, space, vocab_size)
            ]
    return "\n".join(lines)


def _histogram(counts: NDArray[np.int64]) -> str:
    """How many were seen how often, in words."""
    bounds = [1, 2, 4, 8, 16, 64, 1 << 16]
    parts = []
    for low, high in itertools.pairwise(bounds):
        share = ((counts >= low) & (counts < high)).sum() / max(1, len(counts))
        name = f"{low}" if high == low + 1 else f"{low} to {high - 1}"
        parts.append(f"{name if high < bounds[-1] else f'{low} or more'}: {share:.1%}")
    return ", ".join(parts) + " (times: share of the n-grams)"


def _rates(trials: NDArray[np.float32], priors: NDArray[np.float32]) -> str:
    """How much was learned about evidence, in words."""
    tried = (trials != priors).any(axis=1)
    hits, total = trials[tried].sum(axis=0)[[HITS, TRIALS]] if tried.any() else (0, 0)
    share = f"; what they judged came true in {hits / total:.1%}" if total else ""
    return f"{int(tried.sum())} of {len(trials)} were tried{share}"


def frequent_ngrams(trie: Trie, space: int, vocab_size: int) -> list[Ngram]:
    """The n-grams of a space that were seen most often, each as long as it stays that frequent.

    Suffixes are kept as hashes, so every token of the vocabulary is asked for what followed it.
    """
    pairs: list[tuple[int, int, int]] = []
    for token in range(vocab_size):
        row = row_of(np.array([token], np.int32))
        for follower, count in trie.followers(space, row, 0):
            if count > 1:
                heapq.heappush(pairs, (count, token, follower))
                if len(pairs) > 10 * MOST_NGRAMS:
                    heapq.heappop(pairs)
    found: list[Ngram] = []
    for count, *pair in sorted(pairs, reverse=True):
        ngram = _extended(trie, space, Ngram(pair, count))
        if len(found) < MOST_NGRAMS and not any(_within(ngram, other) for other in found):
            found = [other for other in found if not _within(other, ngram)] + [ngram]
    return sorted(found, key=lambda ngram: -ngram.times)


def _extended(trie: Trie, space: int, ngram: Ngram) -> Ngram:
    tokens, least = list(ngram.tokens), ngram.times
    while len(tokens) < LONGEST:
        suffix = max(i for i, order in enumerate(ORDERS) if order <= len(tokens))
        row = row_of(np.array(tokens, np.int32))
        token, times = max(
            trie.followers(space, row, suffix), key=lambda item: item[1], default=(0, 0)
        )
        if times < max(2, ngram.times / 2):
            break
        tokens.append(token)
        least = min(least, times)
    return Ngram(tokens, least)


def _within(ngram: Ngram, other: Ngram) -> bool:
    """Whether `other` tells the same and more."""
    size = len(ngram.tokens)
    return any(
        other.tokens[i : i + size] == ngram.tokens for i in range(len(other.tokens) - size + 1)
    )
