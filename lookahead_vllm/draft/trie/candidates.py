"""The tokens that followed the suffixes of a text, and how strong the evidence for each is.

Source: multi-stage retrieval, Lookahead (KDD 2024), section 4.3.
"""

from typing import NamedTuple

import numpy as np

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
    KEY,
    MAX_UINT16,
    NO_SPACE,
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

# Columns of `Candidates.evidence`, after those of the sources in the trie.
SPARSE_OWN, SPARSE_ANSWERS, CHOSEN = 3, 4, 5
TOKEN = 6
NUM_COLUMNS = 7

KEYS, SLOTS, MATCHES = range(3)  # of `Candidates.lookups`

MAX_CANDIDATES = 12  # of one text, without those of a trained drafter
MAX_ALL_CANDIDATES = MAX_CANDIDATES + NUM_ALTERNATIVES

_STAGES = 2  # suffixes, longest first, that are read in addition to the two shortest
_SHARES, _GAPS, _RANKS = 9, 3, 2
_SPARSE_SHARES = 6

NUM_KINDS = 1 + NUM_CONTIGUOUS * _SHARES * _GAPS * _RANKS
"""Kinds of evidence in one source; 0 is no evidence."""
_COARSE_LENGTHS = (1, 2, 3, 5)  # at most, in tokens; then longer ones, then the whole answer
_NUM_COARSE_LENGTHS = len(_COARSE_LENGTHS) + 2
NUM_COARSE_KINDS = 1 + _NUM_COARSE_LENGTHS * 5 * _GAPS
NUM_SPARSE_KINDS = _SPARSE_SHARES**NUM_SPARSE


class Candidates(NamedTuple):
    """The candidates of one text, as arrays that are reused for every text."""

    evidence: Int32s
    """int32 [MAX_ALL_CANDIDATES, NUM_COLUMNS]: a row for each candidate, with its TOKEN and the
    kind of evidence for it in each source. A kind combines the longest suffix that the token
    followed, its share of what followed, the number of longer suffixes that it never followed, and
    whether it was the last to follow."""
    longest: Int32s
    """int32 [NUM_SPACES]: the longest suffix found in each space, plus 1; 0 for none."""
    lookups: Int64s
    """int64 [3, NUM_SOURCES, NUM_SUFFIXES]: for each suffix the KEYS of its edges, the first of the
    SLOTS of their line, and the MATCHES among these slots, as bits."""


@kernel
def new_candidates() -> Candidates:
    """The arrays for `look_up` and `find_candidates`."""
    return Candidates(
        np.empty((MAX_ALL_CANDIDATES, NUM_COLUMNS), np.int32),
        np.zeros(NUM_SPACES, np.int32),
        # Zeros, because the request's own text has no MATCHES of WHOLE.
        np.zeros((3, NUM_SOURCES, NUM_SUFFIXES), np.int64),
    )


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
    trie: TrieArrays, spaces: Int32s, hashes: Hashes, lookups: Int64s, num_suffixes: int
) -> None:
    """Look up the first `num_suffixes` of NUM_SUFFIXES suffixes of a text in all sources.

    Parameters
    ----------
    spaces : int32 [NUM_SPACES]
        The text's spaces, those of the trie's sources first.
    hashes : uint64 [NUM_HASHES]
        The text's.
    lookups : int64 [3, NUM_SOURCES, NUM_SUFFIXES]
        Receives what `Candidates.lookups` holds.
    """
    edges = trie.edges
    for source in range(NUM_SOURCES):
        if spaces[source] != NO_SPACE:
            first, lines = region_of(trie, spaces[source])
            for suffix in range(num_suffixes):
                if source == OWN and suffix == WHOLE:
                    continue
                key, slot = locate(first, lines, spaces[source], hashes, suffix)
                lookups[KEYS, source, suffix], lookups[SLOTS, source, suffix] = key, slot
    # Reads each line once in a loop that is as small as possible, so that the processor fetches
    # all lines at the same time.
    for source in range(NUM_SOURCES):
        if spaces[source] != NO_SPACE:
            for suffix in range(num_suffixes):
                if source == OWN and suffix == WHOLE:
                    continue
                lookups[MATCHES, source, suffix] = edges[lookups[SLOTS, source, suffix], KEY]
    for source in range(NUM_SOURCES):
        if spaces[source] != NO_SPACE:
            for suffix in range(num_suffixes):
                if source == OWN and suffix == WHOLE:
                    continue
                lookups[MATCHES, source, suffix] = matches(
                    edges, lookups[KEYS, source, suffix], lookups[SLOTS, source, suffix]
                )


@borrowing_kernel
def _total(edges: Int64s, slot: int, matching: int) -> int:
    total = 0
    while matching:
        if matching & 1:
            total += edges[slot, USE] >> COUNT_SHIFT & MAX_UINT16
        slot += 1
        matching >>= 1
    return total


@borrowing_kernel
def add_candidate(
    token: int, evidence: Int32s, size: int, may_add: bool, max_size: int
) -> tuple[int, int]:
    """The row of `token` among the `size` candidates, -1 for none, and the new size.

    A new token gets a row if `may_add` is true and there are fewer than `max_size` candidates.
    """
    for i in range(size):
        if evidence[i, TOKEN] == token:
            return i, size
    if not may_add or size == max_size:
        return -1, size
    for column in range(TOKEN):
        evidence[size, column] = 0
    evidence[size, TOKEN] = token
    return size, size + 1


@borrowing_kernel
def find_candidates(
    edges: Int64s, spaces: Int32s, candidates: Candidates, max_size: int, num_suffixes: int
) -> int:
    """Collect what followed the longest suffix, the next one, the shortest and the sparse ones.

    The request's own text comes first, unless an answer to the same prompt begins alike.

    Parameters
    ----------
    spaces : int32 [NUM_SPACES]
        The text's spaces.
    candidates : Candidates
        `lookups` is filled by `look_up`; `evidence` and `longest` are filled here.
    max_size : int
        The most candidates, at most MAX_CANDIDATES.
    num_suffixes : int
        The number of suffixes that were looked up: NUM_SUFFIXES, or only the contiguous ones.

    Returns
    -------
    int
        The number of candidates.
    """
    evidence, longest, lookups = candidates.evidence, candidates.longest, candidates.lookups
    size = 0
    repeats = spaces[ANSWERS] != NO_SPACE and lookups[MATCHES, ANSWERS, WHOLE] != 0
    for turn in range(NUM_SOURCES):
        source = turn
        if repeats and turn != REFERENCE:
            source = ANSWERS if turn == OWN else OWN
        longest[source] = 0
        if spaces[source] == NO_SPACE:
            continue
        stage = 0
        for suffix in range(NUM_CONTIGUOUS - 1, -1, -1):
            matching = lookups[MATCHES, source, suffix]
            if matching == 0 or (stage >= _STAGES and suffix > 1):
                continue
            if stage == 0:
                longest[source] = suffix + 1
            slot = lookups[SLOTS, source, suffix]
            total = _total(edges, slot, matching)
            gap = min(stage, _GAPS - 1)
            rank = 0
            while matching:
                if matching & 1:
                    use = edges[slot, USE]
                    share = _share(use >> COUNT_SHIFT & MAX_UINT16, total)
                    # A token that rarely follows a single token is not worth a row.
                    at, size = add_candidate(
                        use & TOKEN_MASK, evidence, size, suffix > 0 or share > 0, max_size
                    )
                    if at >= 0 and evidence[at, source] == 0:
                        evidence[at, source] = _kind(suffix, share, gap, rank)
                    rank = 1
                slot += 1
                matching >>= 1
            stage += 1
        if source == REFERENCE:
            continue
        weight = 1
        for sparse in range(num_suffixes - NUM_CONTIGUOUS):
            matching = lookups[MATCHES, source, NUM_CONTIGUOUS + sparse]
            slot = lookups[SLOTS, source, NUM_CONTIGUOUS + sparse]
            total = _total(edges, slot, matching)
            while matching:
                if matching & 1:
                    use = edges[slot, USE]
                    at, size = add_candidate(use & TOKEN_MASK, evidence, size, True, max_size)
                    if at >= 0:
                        share = _share(use >> COUNT_SHIFT & MAX_UINT16, total)
                        part = 1 + min(share // 2, _SPARSE_SHARES - 2)
                        evidence[at, SPARSE_OWN + source] += part * weight
                slot += 1
                matching >>= 1
            weight *= _SPARSE_SHARES
    return size
