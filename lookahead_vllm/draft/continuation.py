"""What may follow a text, by what was seen to follow it, and how good the evidence is.

Source: multi-stage retrieval, Lookahead (KDD 2024), section 4.3.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lookahead_vllm.draft.suffix import NUM_SPARSE, NUM_SUFFIXES, ORDERS, Hashes
from lookahead_vllm.draft.trie import MAX_COUNT, NOWHERE, TOKEN, USE, Ints, find

OWN, ANSWERS, REFERENCE = range(3)
"""Sources: the request's own text, other answers of its namespace, texts it was given to copy."""
NUM_SOURCES = 3

SPARSE_OWN, SPARSE_ANSWERS = 3, 4
NUM_COLUMNS = 5

MAX_CONTINUATIONS = 32  # of one text

_STAGES = 2  # how many suffixes, longest first, may name continuations, beside the two shortest
_SHARES, _GAPS, _RANKS = 9, 3, 2
_SPARSE_SHARES = 6

NUM_KINDS = 1 + len(ORDERS) * _SHARES * _GAPS * _RANKS
"""How many kinds of evidence there are in one source; 0 is none."""
NUM_COARSE = 1 + 5 * 5 * _GAPS
NUM_SPARSE_KINDS = _SPARSE_SHARES**NUM_SPARSE

_NO_EVIDENCE = -1


@njit(cache=True)
def _share(count: int, total: int) -> int:
    """The share of a continuation; one that always followed is told by how often that was."""
    if count < 0.05 * total:
        return 0
    if count < 0.1 * total:
        return 1
    if count < 0.3 * total:
        return 2
    if count < 0.6 * total:
        return 3
    if count < 0.95 * total:
        return 4
    return 5 if total < 2 else 6 if total < 3 else 7 if total < 5 else 8


@njit(cache=True)
def _kind(suffix: int, share: int, gap: int, rank: int) -> int:
    return 1 + ((suffix * _SHARES + share) * _GAPS + gap) * _RANKS + rank


def _coarse_kinds() -> Ints:
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


@njit(cache=True)
def _place(token: int, tokens: Ints, kinds: Ints, found: int, new: bool) -> tuple[int, int]:
    """Where `token` stands among `tokens`, or a new place at their end if there is room."""
    for i in range(found):
        if tokens[i] == token:
            return i, found
    if not new or found == len(tokens):
        return -1, found
    tokens[found] = token
    kinds[found] = 0
    return found, found + 1


@njit(cache=True)
def find_continuations(
    edges: Ints, live: Ints, spaces: Ints, row: Hashes, tokens: Ints, kinds: Ints, longest: Ints
) -> int:
    """Collect what followed the longest suffix, the next one, the shortest and the sparse ones.

    `spaces` int32 [NUM_SOURCES] is where to look. Fills `tokens` int32 [MAX_CONTINUATIONS] and
    `kinds` int32 [MAX_CONTINUATIONS, NUM_COLUMNS], and returns how many. The kind of evidence of
    one source tells four things apart: the longest suffix that the token followed there, its
    share of what followed, how many longer suffixes were seen that it never followed, and
    whether it was the last to follow. `longest` int32 [NUM_SOURCES] gets the longest suffix seen
    in each source, plus 1.
    """
    windows = np.empty((NUM_SOURCES, NUM_SUFFIXES), np.int64)
    matches = np.empty((NUM_SOURCES, NUM_SUFFIXES), np.int64)
    # First all of them, so that the processor fetches many lines of the table at a time.
    for source in range(NUM_SOURCES):
        if spaces[source] != NOWHERE:
            for suffix in range(NUM_SUFFIXES):
                windows[source, suffix], matches[source, suffix] = find(
                    edges, live, spaces[source], row, suffix
                )
    found = 0
    for source in range(NUM_SOURCES):
        longest[source] = 0
        if spaces[source] == NOWHERE:
            continue
        stage = 0
        for suffix in range(len(ORDERS) - 1, -1, -1):
            slots = matches[source, suffix]
            if slots == 0 or (stage >= _STAGES and suffix > 1):
                continue
            if stage == 0:
                longest[source] = suffix + 1
            window = windows[source, suffix]
            total = _total(edges, window, slots)
            gap = min(stage, _GAPS - 1)
            rank = 0
            slot = window
            while slots:
                if slots & 1:
                    share = _share(edges[slot, USE] & MAX_COUNT, total)
                    at, found = _place(
                        edges[slot, TOKEN], tokens, kinds, found, suffix > 0 or share > 0
                    )
                    if at >= 0 and kinds[at, source] == 0:
                        kinds[at, source] = _kind(suffix, share, gap, rank)
                    rank = 1
                slot += 1
                slots >>= 1
            stage += 1
        if source == REFERENCE:
            continue
        for sparse in range(NUM_SPARSE):
            slots = matches[source, len(ORDERS) + sparse]
            slot = windows[source, len(ORDERS) + sparse]
            total = _total(edges, slot, slots)
            while slots:
                if slots & 1:
                    share = _share(edges[slot, USE] & MAX_COUNT, total)
                    at, found = _place(edges[slot, TOKEN], tokens, kinds, found, True)
                    if at >= 0:
                        part = 1 + min(share // 2, _SPARSE_SHARES - 2)
                        kinds[at, SPARSE_OWN + source] += part * _SPARSE_SHARES**sparse
                slot += 1
                slots >>= 1
    return found


@njit(cache=True)
def _total(edges: Ints, slot: int, slots: int) -> int:
    total = 0
    while slots:
        if slots & 1:
            total += edges[slot, USE] & MAX_COUNT
        slot += 1
        slots >>= 1
    return total
