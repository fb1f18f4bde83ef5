"""What may follow a text, by what was seen to follow it, and how good the evidence is.

Source: multi-stage retrieval, Lookahead (KDD 2024), section 4.3.
"""

from __future__ import annotations

import numpy as np

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.sources import REFERENCE
from lookahead_vllm.draft.trie.suffix import NUM_SPARSE, NUM_SUFFIXES, ORDERS, Hashes
from lookahead_vllm.draft.trie.table import (
    COUNT_SHIFT,
    MOST,
    NAME,
    NO_SPACE,
    TOKEN_BITS,
    USE,
    locate,
    matches,
    region_of,
)

NUM_SOURCES = 3
"""Those in the trie: OWN, ANSWERS and REFERENCE."""
CHOICES = 3
"""And the model's choices, see `recycling.py`, among a text's spaces and longest matches."""
NUM_SPACES = 4

# The columns of what was found: the sources in the trie, and more.
SPARSE_OWN, SPARSE_ANSWERS, CHOSEN = 3, 4, 5
TOKEN = 6
NUM_COLUMNS = 7

NAMES, SLOT, HELD = range(3)  # of the places where a suffix is looked for

MAX_CANDIDATES = 12  # of one text

_STAGES = 2  # how many suffixes, longest first, may name continuations, beside the two shortest
_SHARES, _GAPS, _RANKS = 9, 3, 2
_SPARSE_SHARES = 6

NUM_KINDS = 1 + len(ORDERS) * _SHARES * _GAPS * _RANKS
"""How many kinds of evidence there are in one source; 0 is none."""
NUM_COARSE_KINDS = 1 + 5 * 5 * _GAPS
NUM_SPARSE_KINDS = _SPARSE_SHARES**NUM_SPARSE


@kernel
def _share(count: int, total: int) -> int:
    """The share of a continuation; one that always followed is told by how often that was."""
    # Without a branch: no processor foresees them.
    share = np.int64(20 * count >= total)  # a twentieth
    share += np.int64(10 * count >= total)
    share += np.int64(10 * count >= 3 * total)
    share += np.int64(10 * count >= 6 * total)
    share += np.int64(20 * count >= 19 * total)
    often = np.int64(total >= 2) + np.int64(total >= 3) + np.int64(total >= 5)
    return int(share + often * np.int64(share == 5))


@kernel
def _kind(suffix: int, share: int, gap: int, rank: int) -> int:
    return 1 + ((suffix * _SHARES + share) * _GAPS + gap) * _RANKS + rank


def _coarse_kinds() -> Int32s:
    kinds = np.zeros(NUM_KINDS, np.int32)
    for suffix, order in enumerate(ORDERS):
        for share in range(_SHARES):
            for gap in range(_GAPS):
                for rank in range(_RANKS):
                    length = np.searchsorted((1, 2, 3, 5), order)
                    part = (0, 0, 1, 2, 3, 3, 4, 4, 4)[share]
                    kinds[_kind.py_func(suffix, share, gap, rank)] = (
                        1 + (length * 5 + part) * _GAPS + gap
                    )
    return kinds


COARSE = _coarse_kinds()
"""int32 [NUM_KINDS]: fewer kinds, for pairs of them."""


@kernel
def candidate_scratch() -> tuple[Int32s, Int32s, Int64s]:
    """`found`, `longest` and `places` for `find_candidates`, to be used again and again."""
    return (
        np.empty((MAX_CANDIDATES, NUM_COLUMNS), np.int32),
        np.zeros(NUM_SPACES, np.int32),
        np.empty((3, NUM_SOURCES, NUM_SUFFIXES), np.int64),
    )


@kernel
def look_up(
    edges: Int64s, live: Int32s, spaces: Int32s, row: Hashes, places: Int64s, suffixes: int
) -> None:
    """Match the first `suffixes` of NUM_SUFFIXES suffixes in all sources.

    Parameters
    ----------
    spaces : int32 [NUM_SPACES]
        Where to look; the first ones are the trie's.
    places : int64 [3, NUM_SOURCES, NUM_SUFFIXES]
        Gets the NAMES of the suffixes, the first SLOT of each and which slots are HELD by its
        edges.
    """
    for source in range(NUM_SOURCES):
        if spaces[source] != NO_SPACE:
            first, lines = region_of(edges, live, spaces[source])
            for suffix in range(suffixes):
                name, slot = locate(first, lines, spaces[source], row, suffix)
                places[NAMES, source, suffix], places[SLOT, source, suffix] = name, slot
    # One look at every line in a loop as small as can be: the processor then waits for all of
    # them together.
    for source in range(NUM_SOURCES):
        if spaces[source] != NO_SPACE:
            for suffix in range(suffixes):
                places[HELD, source, suffix] = edges[places[SLOT, source, suffix], NAME]
    for source in range(NUM_SOURCES):
        if spaces[source] != NO_SPACE:
            for suffix in range(suffixes):
                places[HELD, source, suffix] = matches(
                    edges, places[NAMES, source, suffix], places[SLOT, source, suffix]
                )


@kernel
def _total(edges: Int64s, slot: int, slots: int) -> int:
    total = 0
    while slots:
        if slots & 1:
            total += edges[slot, USE] >> COUNT_SHIFT & MOST
        slot += 1
        slots >>= 1
    return total


@kernel
def place(token: int, found: Int32s, size: int, may_add: bool, most: int) -> tuple[int, int]:
    """Where `token` stands among those found, and how many those are now; -1 for nowhere."""
    for i in range(size):
        if found[i, TOKEN] == token:
            return i, size
    if not may_add or size == most:
        return -1, size
    for column in range(TOKEN):
        found[size, column] = 0
    found[size, TOKEN] = token
    return size, size + 1


@kernel
def find_candidates(
    edges: Int64s,
    spaces: Int32s,
    found: Int32s,
    longest: Int32s,
    places: Int64s,
    most: int,
    suffixes: int,
) -> int:
    """Collect what followed the longest suffix, the next one, the shortest and the sparse ones.

    Parameters
    ----------
    spaces : int32 [NUM_SPACES]
        Where was looked.
    found : int32 [MAX_CANDIDATES, NUM_COLUMNS]
        Gets a row for each continuation: its token, and the kind of evidence for it in each
        source, which tells four things apart: the longest suffix that the token followed there,
        its share of what followed, how many longer suffixes were seen that it never followed, and
        whether it was the last to follow.
    longest : int32 [NUM_SPACES]
        Gets the longest suffix seen in each source, plus 1.
    places : int64 [3, NUM_SOURCES, NUM_SUFFIXES]
        What `look_up` found.
    most : int
        How many may be found, at most MAX_CANDIDATES.
    suffixes : int
        How many were looked up: all NUM_SUFFIXES, or the contiguous ones alone.

    Returns
    -------
    int
        How many were found.
    """
    size = 0
    for source in range(NUM_SOURCES):
        longest[source] = 0
        if spaces[source] == NO_SPACE:
            continue
        stage = 0
        for suffix in range(len(ORDERS) - 1, -1, -1):
            slots = places[HELD, source, suffix]
            if slots == 0 or (stage >= _STAGES and suffix > 1):
                continue
            if stage == 0:
                longest[source] = suffix + 1
            slot = places[SLOT, source, suffix]
            total = _total(edges, slot, slots)
            gap = min(stage, _GAPS - 1)
            rank = 0
            while slots:
                if slots & 1:
                    use = edges[slot, USE]
                    share = _share(use >> COUNT_SHIFT & MOST, total)
                    # What seldom follows a single token is not worth looking at.
                    at, size = place(use & TOKEN_BITS, found, size, suffix > 0 or share > 0, most)
                    if at >= 0 and found[at, source] == 0:
                        found[at, source] = _kind(suffix, share, gap, rank)
                    rank = 1
                slot += 1
                slots >>= 1
            stage += 1
        if source == REFERENCE:
            continue
        weight = 1
        for sparse in range(suffixes - len(ORDERS)):
            slots = places[HELD, source, len(ORDERS) + sparse]
            slot = places[SLOT, source, len(ORDERS) + sparse]
            total = _total(edges, slot, slots)
            while slots:
                if slots & 1:
                    use = edges[slot, USE]
                    at, size = place(use & TOKEN_BITS, found, size, True, most)
                    if at >= 0:
                        share = _share(use >> COUNT_SHIFT & MOST, total)
                        part = 1 + min(share // 2, _SPARSE_SHARES - 2)
                        found[at, SPARSE_OWN + source] += part * weight
                slot += 1
                slots >>= 1
            weight *= _SPARSE_SHARES
    return size
