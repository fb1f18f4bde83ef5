"""A readable report on a cache file."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.file import CacheFileError
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.draft.trie.acceptance_rate import HITS, TRIALS, AcceptanceRate
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.draft.trie.suffix import ORDERS, hashes_of
from lookahead_vllm.draft.trie.table import Trie, counts_of, spaces_of

MAX_NAMESPACES = 20
"""The number of namespaces that are listed."""

MAX_NGRAMS = 20
"""The number of n-grams that are shown for a namespace."""

MAX_NGRAM_TOKENS = 32
"""The length of the longest n-gram that is shown."""

Decode = Callable[[list[int]], str]


class Ngram(NamedTuple):
    """A sequence of tokens, and the count of its rarest edge."""

    tokens: list[int]
    times: int


def describe(
    path: Path, tokenizer: str | None = None, vocab_size: int = 0, decode: Decode | None = None
) -> str:
    """Report on the file, in several lines.

    Parameters
    ----------
    path : Path
        The file.
    tokenizer : str, optional
        The fingerprint that the file must have.
    vocab_size : int
        The number of token ids; needed with `decode`.
    decode : callable, optional
        Turns token ids into text. With it, the report shows the most frequent n-grams.

    Raises
    ------
    CacheFileError, OSError
        As `cache.file.load`.
    """
    header = cache_file.read_header(path)
    arrays, facts = cache_file.load(path, tokenizer)
    proposer = restored(arrays, facts)

    edges = arrays["edges"]
    spaces = spaces_of(edges)
    held = spaces > 0
    total = int(held.sum())
    lines = [
        f"{path}: {path.stat().st_size / 1e6:.1f} MB, intact",
        f"made        {_date(header.created)}, by lookahead-vllm {header.release}",
        f"tokenizer   {header.tokenizer}",
        f"n-grams     {total} of at most {len(edges)} ({total / len(edges):.1%}); "
        f"{proposer.trie.num_pruned} were pruned so far",
        f"seen        {_histogram(counts_of(edges)[held])}",
        f"rates       {_rates(arrays['trials'], AcceptanceRate().trials)}",
        f"namespaces  {header.namespaces}",
    ]
    sizes = dict(zip(*np.unique(spaces[held], return_counts=True), strict=True))
    namespaces = sorted(facts["namespaces"].items(), key=lambda item: -sizes.get(item[1], 0))
    for digest, space in namespaces[:MAX_NAMESPACES]:
        name = "   (the one without a name)" if digest == digest_of("") else ""
        lines.append(f"  {digest}  {sizes.get(space, 0):>10} n-grams{name}")
    if len(namespaces) > MAX_NAMESPACES:
        lines.append(f"  and {len(namespaces) - MAX_NAMESPACES} smaller ones")
    if decode is not None:
        for digest, space in namespaces[:3]:
            lines += ["", f"most frequent in {digest}:"]
            lines += [
                f"  {ngram.times:>6} x {decode(ngram.tokens)!r}"
                for ngram in frequent_ngrams(proposer.trie, space, vocab_size)
            ]
    return "\n".join(lines)


def restored(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> NGramTrieProposer:
    """A proposer with the contents of a cache file, as `cache.file.load` returns them.

    Raises
    ------
    CacheFileError
        They do not fit this release.
    """
    if "edges" not in arrays:
        raise CacheFileError("it holds no n-grams of lookahead: its edges are missing")
    try:
        return NGramTrieProposer.of_snapshot(arrays, facts)
    except OptionError as error:
        raise CacheFileError(
            f"it was made with options that this release of lookahead refuses: {error}"
        ) from None
    except ValueError as error:
        raise CacheFileError(str(error)) from None


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at no valid date"


def _histogram(counts: NDArray[np.int64]) -> str:
    """The share of n-grams in each range of counts, as text."""
    bounds = [1, 2, 4, 8, 16, 64, 1 << 16]
    parts = []
    for low, high in itertools.pairwise(bounds):
        share = ((counts >= low) & (counts < high)).sum() / max(1, len(counts))
        name = f"{low}" if high == low + 1 else f"{low} to {high - 1}"
        parts.append(f"{name if high < bounds[-1] else f'{low} or more'}: {share:.1%}")
    return ", ".join(parts) + " (times: share of the n-grams)"


def _rates(trials: NDArray[np.float32], priors: NDArray[np.float32]) -> str:
    """The number of acceptance rates with trials, and their mean, as text."""
    tried = (trials != priors).any(axis=1)
    hits, total = trials[tried].sum(axis=0)[[HITS, TRIALS]] if tried.any() else (0, 0)
    share = f"; {hits / total:.1%} of their trials were hits" if total else ""
    return f"{int(tried.sum())} of {len(trials)} were tried{share}"


def frequent_ngrams(trie: Trie, space: int, vocab_size: int) -> list[Ngram]:
    """The most frequent n-grams of a space, each extended while it stays about as frequent.

    The trie holds suffixes as hashes, so the followers of every token of the vocabulary are
    looked up.
    """
    pairs: list[tuple[int, int, int]] = []
    for token in range(vocab_size):
        hashes = hashes_of(np.array([token], np.int32))
        for follower, count in trie.followers(space, hashes, 0):
            if count > 1:
                heapq.heappush(pairs, (count, token, follower))
                if len(pairs) > 10 * MAX_NGRAMS:
                    heapq.heappop(pairs)
    found: list[Ngram] = []
    for count, *pair in sorted(pairs, reverse=True):
        ngram = _extended(trie, space, Ngram(pair, count))
        if len(found) < MAX_NGRAMS and not any(_within(ngram, other) for other in found):
            found = [other for other in found if not _within(other, ngram)] + [ngram]
    return sorted(found, key=lambda ngram: -ngram.times)


def _extended(trie: Trie, space: int, ngram: Ngram) -> Ngram:
    """Append the most frequent follower while its count is at least half of the n-gram's."""
    tokens, min_times = list(ngram.tokens), ngram.times
    while len(tokens) < MAX_NGRAM_TOKENS:
        suffix = max(i for i, order in enumerate(ORDERS) if order <= len(tokens))
        hashes = hashes_of(np.array(tokens, np.int32))
        token, times = max(
            trie.followers(space, hashes, suffix), key=lambda item: item[1], default=(0, 0)
        )
        if times < max(2, ngram.times / 2):
            break
        tokens.append(token)
        min_times = min(min_times, times)
    return Ngram(tokens, min_times)


def _within(ngram: Ngram, other: Ngram) -> bool:
    """Whether the tokens of `other` contain those of `ngram`."""
    size = len(ngram.tokens)
    return any(
        other.tokens[i : i + size] == ngram.tokens for i in range(len(other.tokens) - size + 1)
    )
