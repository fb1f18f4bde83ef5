"""The tokens that followed the suffixes of a text, and how strong the evidence for each is.

Source: multi-stage retrieval, Lookahead (KDD 2024), section 4.3.
"""

from typing import NamedTuple

import numpy as np

from lookahead_vllm.draft.instructions import NUM_LANES, equal_lanes, lowest_bit, prefetch
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.progress import NUM_ALTERNATIVES
from lookahead_vllm.draft.sources import ANSWERS, OWN, REFERENCE
from lookahead_vllm.draft.trie.suffix import (
    NUM_CONTIGUOUS,
    NUM_SPARSE,
    NUM_SUFFIXES,
    ORDERS,
    WHOLE,
    Hashes,
)
from lookahead_vllm.draft.trie.table import (
    COUNT_SHIFT,
    MAX_UINT16,
    NO_SPACE,
    SLOTS_PER_LINE,
    TOKEN_MASK,
    USE,
    TrieArrays,
    locate,
    matches,
    region_of,
)

NUM_SOURCES = 3
"""The sources in the trie: OWN, ANSWERS and REFERENCE."""
CHOICES = 3
"""The index of the model's choices (`recycling.py`) in a text's spaces and longest matches."""
NUM_SPACES = 4

# Rows of `Candidates.evidence`, after those of the sources in the trie.
SPARSE_OWN, SPARSE_ANSWERS, CHOSEN = 3, 4, 5
TOKEN = 6
NUM_ROWS = 7

MAX_CANDIDATES = 12  # of one text, without those of a trained drafter
MAX_ALL_CANDIDATES = MAX_CANDIDATES + NUM_ALTERNATIVES
assert MAX_ALL_CANDIDATES == NUM_LANES

_SHIFTS = np.array([*range(4 * WHOLE, -1, -4), *range(4 * NUM_CONTIGUOUS, 4 * NUM_SUFFIXES, 4)])
_LINE = 15  # the bits of one suffix
_SHORTEST = (_LINE << 4 | _LINE) << 4 * (WHOLE - 1)
_SHARES, _GAPS, _RANKS = 9, 3, 2
_SPARSE_SHARES = 6

NUM_KINDS = 1 + NUM_CONTIGUOUS * _SHARES * _GAPS * _RANKS
"""Kinds of evidence in one source; 0 is no evidence."""
_COARSE_LENGTHS = (1, 2, 3, 5)  # at most, in tokens; then longer ones, then the whole answer
_NUM_COARSE_LENGTHS = len(_COARSE_LENGTHS) + 2
NUM_COARSE_KINDS = 1 + _NUM_COARSE_LENGTHS * 5 * _GAPS
NUM_SPARSE_KINDS = _SPARSE_SHARES**NUM_SPARSE


class Lookups(NamedTuple):
    """Where the suffixes of a text are in the trie, as arrays that are reused for every text."""

    keys: Int64s
    """int64 [NUM_SOURCES, NUM_SUFFIXES]: the KEY of each suffix's edges."""
    slots: Int64s
    """int64 [NUM_SOURCES, NUM_SUFFIXES]: the first slot of their line."""
    matches: Int64s
    """int64 [NUM_SOURCES]: which slots of these lines have edges of the suffix, as bits: those of
    suffix k from `_SHIFTS[k]` on, the longest suffix first."""


class Candidates(NamedTuple):
    """The candidates of one text, as arrays that are reused for every text."""

    evidence: Int32s
    """int32 [NUM_ROWS, MAX_ALL_CANDIDATES + 1]: of each candidate the TOKEN and the kind of
    evidence for it in each source. A kind combines the longest suffix that the token followed, its
    share of what followed, the number of longer suffixes that it never followed, and whether it was
    the last to follow. The column behind the candidates is nobody's."""
    longest: Int32s
    """int32 [NUM_SPACES]: the longest suffix found in each space, plus 1; 0 for none."""


@kernel
def new_lookups() -> Lookups:
    """The arrays for `look_up`."""
    keys = np.empty((NUM_SOURCES, NUM_SUFFIXES), np.int64)
    return Lookups(keys, np.empty_like(keys), np.empty(NUM_SOURCES, np.int64))


@kernel
def new_candidates() -> Candidates:
    """The arrays for `find_candidates`."""
    evidence = np.empty((NUM_ROWS, MAX_ALL_CANDIDATES + 1), np.int32)
    return Candidates(evidence, np.zeros(NUM_SPACES, np.int32))


@borrowing_kernel
def _share(count: int, total: int) -> int:
    """The class of a token's share; a share of nearly 1 is divided further by `total`."""
    # Without branches, which the processor cannot predict here.
    share = np.int64(20 * count >= total)  # a twentieth
    share += np.int64(10 * count >= total)
    share += np.int64(10 * count >= 3 * total)
    share += np.int64(10 * count >= 6 * total)
    share += np.int64(20 * count >= 19 * total)
    often = np.int64(total >= 2) + np.int64(total >= 3) + np.int64(total >= 5)
    return int(share + often * np.int64(share == 5))


@borrowing_kernel
def _kind(suffix: int, share: int, gap: int, rank: int) -> int:
    return 1 + ((suffix * _SHARES + share) * _GAPS + gap) * _RANKS + rank


def _coarse_kinds() -> Int32s:
    kinds = np.zeros(NUM_KINDS, np.int32)
    lengths = [*np.searchsorted(_COARSE_LENGTHS, ORDERS), _NUM_COARSE_LENGTHS - 1]
    for suffix, length in enumerate(lengths):
        for share in range(_SHARES):
            for gap in range(_GAPS):
                for rank in range(_RANKS):
                    part = (0, 0, 1, 2, 3, 3, 4, 4, 4)[share]
                    kinds[_kind.py_func(suffix, share, gap, rank)] = (
                        1 + (length * 5 + part) * _GAPS + gap
                    )
    return kinds


REPEAT_KINDS = np.arange(_kind.py_func(WHOLE, 5, 0, 0), NUM_KINDS)[: (_SHARES - 5) * _GAPS * _RANKS]
"""int64: the kinds of a token that alone followed the whole answer."""

COARSE_KINDS = _coarse_kinds()
"""int32 [NUM_KINDS]: the coarse kind, below NUM_COARSE_KINDS, of each kind; for pairs of kinds."""


@borrowing_kernel
def look_up(
    trie: TrieArrays, spaces: Int32s, hashes: Hashes, lookups: Lookups, num_suffixes: int
) -> None:
    """Have the memory fetch the lines of the first `num_suffixes` suffixes of a text.

    Parameters
    ----------
    spaces : int32 [NUM_SPACES]
        The text's spaces, those of the trie's sources first.
    hashes : uint64 [NUM_HASHES]
        The text's.
    lookups : Lookups
        Filled but for the matches.
    """
    keys, slots = lookups.keys, lookups.slots
    for source in range(NUM_SOURCES):
        if spaces[source] != NO_SPACE:
            first, lines = region_of(trie, spaces[source])
            for suffix in range(num_suffixes):
                if source == OWN and suffix == WHOLE:
                    continue
                key, slot = locate(first, lines, spaces[source], hashes, suffix)
                keys[source, suffix], slots[source, suffix] = key, slot
                prefetch(trie.edges[slot], 0)


@borrowing_kernel
def match(edges: Int64s, spaces: Int32s, lookups: Lookups, num_suffixes: int) -> None:
    """Fill in the matches of what `look_up` has looked up."""
    for source in range(NUM_SOURCES):
        found = 0
        if spaces[source] != NO_SPACE:
            for suffix in range(num_suffixes):
                if source == OWN and suffix == WHOLE:
                    continue
                key, slot = lookups.keys[source, suffix], lookups.slots[source, suffix]
                found |= matches(edges, key, slot) << _SHIFTS[suffix]
        lookups.matches[source] = found


@borrowing_kernel
def _total(edges: Int64s, slot: int, line: int) -> int:
    """How often the edges followed that `line` has as bits, which begins at `slot`."""
    total = 0
    for i in range(SLOTS_PER_LINE):  # without a branch
        total += (edges[slot + i, USE] >> COUNT_SHIFT & MAX_UINT16) * (line >> i & 1)
    return total


@borrowing_kernel
def add_candidate(
    token: int, evidence: Int32s, size: int, may_add: bool, max_size: int
) -> tuple[int, int]:
    """The index of `token` among the `size` candidates, and the new size.

    A new token is added if `may_add` is true and there are fewer than `max_size` candidates. If it
    is not, its index is `size`, which is nobody's.
    """
    # Without a branch, which the processor could not predict.
    equal = equal_lanes(evidence[TOKEN], np.int32(token)) & ((1 << size) - 1)
    at = lowest_bit(equal | 1 << size)
    is_new = np.int32(equal == 0)
    for row in range(TOKEN):
        evidence[row, at] &= is_new - 1
    evidence[TOKEN, at] = token
    return at, int(size + np.int64(is_new & may_add & (size < max_size)))


@borrowing_kernel
def find_candidates(
    edges: Int64s, spaces: Int32s, lookups: Lookups, candidates: Candidates, max_size: int
) -> int:
    """Collect what followed the longest suffix, the next one, the shortest and the sparse ones.

    The request's own text comes first, unless an answer to the same prompt begins alike.

    Parameters
    ----------
    spaces : int32 [NUM_SPACES]
        The text's spaces.
    lookups : Lookups
        Filled by `look_up` and `match`.
    candidates : Candidates
        Filled here.
    max_size : int
        The most candidates, at most MAX_CANDIDATES.

    Returns
    -------
    int
        The number of candidates.
    """
    evidence, longest = candidates.evidence, candidates.longest
    size = 0
    repeats = lookups.matches[ANSWERS] & _LINE != 0
    for turn in range(NUM_SOURCES):
        source = turn
        if repeats and turn != REFERENCE:
            source = ANSWERS if turn == OWN else OWN
        longest[source] = 0
        found = lookups.matches[source]
        if found == 0:
            continue
        slots = lookups.slots[source]
        rest = contiguous = found & ((1 << 4 * NUM_CONTIGUOUS) - 1)
        # The two longest suffixes and the two shortest ones are read.
        first = lowest_bit(rest | 1 << 4 * NUM_CONTIGUOUS) & ~3
        rest &= ~(_LINE << first)
        second = lowest_bit(rest | 1 << 4 * NUM_CONTIGUOUS) & ~3
        read = contiguous & (_LINE << first | _LINE << second | _SHORTEST)
        longest[source] = NUM_CONTIGUOUS - (first >> 2)
        while read:
            bit = lowest_bit(read)
            read &= read - 1
            place = bit & ~3
            suffix = WHOLE - (place >> 2)
            line, slot = contiguous >> place & _LINE, slots[suffix]
            use = edges[slot + (bit & 3), USE]
            share = _share(use >> COUNT_SHIFT & MAX_UINT16, _total(edges, slot, line))
            gap = np.int64(place > first) + np.int64(place > second)
            rank = np.int64(line & ((1 << (bit & 3)) - 1) != 0)
            # A token that rarely follows a single token is not worth a place.
            at, size = add_candidate(
                use & TOKEN_MASK, evidence, size, (suffix > 0) | (share > 0), max_size
            )
            kind = evidence[source, at]
            evidence[source, at] = kind if kind else _kind(suffix, share, gap, rank)
        if source == REFERENCE:
            continue
        sparse = found >> 4 * NUM_CONTIGUOUS
        read = sparse
        while read:
            bit = lowest_bit(read)
            read &= read - 1
            place = bit & ~3
            line, slot = sparse >> place & _LINE, slots[NUM_CONTIGUOUS + (place >> 2)]
            use = edges[slot + (bit & 3), USE]
            share = _share(use >> COUNT_SHIFT & MAX_UINT16, _total(edges, slot, line))
            at, size = add_candidate(use & TOKEN_MASK, evidence, size, True, max_size)
            part = 1 + min(share // 2, _SPARSE_SHARES - 2)
            evidence[SPARSE_OWN + source, at] += part * (_SPARSE_SHARES if place else 1)
    return size
