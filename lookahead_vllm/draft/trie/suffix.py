"""The suffixes of a text by which it is looked up, as rolling hashes.

A text that is being read is a row of hashes, uint64 [ROW]: entry k is the hash of its last k
tokens, for k up to the longest of ORDERS, and two more leave out the last token. What one token
adds is O(ROW), whatever the text's length, and nothing points anywhere: a row of a tree's node
is made from its parent's. Before its first token a text is all zeros, so that a suffix which
reaches back beyond the beginning is one that begins the text.

Sparse contexts (the two that leave out the last token) find the way back into a text that is
copied with one word changed. They are known from context mixing compressors (PAQ).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import kernel
from lookahead_vllm.draft.tree import UNKNOWN

Hashes = NDArray[np.uint64]

ORDERS = (1, 2, 3, 5, 9, 16)
"""How many tokens the contiguous suffixes have."""

NUM_SPARSE = 2
"""The last token but one, and the two before the last one."""

NUM_SUFFIXES = len(ORDERS) + NUM_SPARSE

_LONGEST = ORDERS[-1]
ROW = _LONGEST + 1 + NUM_SPARSE

_A, _B, _C = (
    np.uint64(m) for m in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F)
)  # odd, with bits well spread
_PLACES = np.array([*ORDERS, _LONGEST + 1, _LONGEST + 2])
_SHIFT = np.uint64(29)


def empty_row() -> Hashes:
    """The row of a text without a token."""
    return np.zeros(ROW, np.uint64)


@kernel
def advance(row: Hashes, token: int, following: Hashes) -> None:
    """Fill `following`, uint64 [ROW], with `row` after one more token; not the same array."""
    mixed = (np.uint64(token) + np.uint64(1)) * _A
    mixed ^= mixed >> _SHIFT
    for k in range(_LONGEST):
        following[k + 1] = row[k] * _B + mixed
    following[0] = 0
    following[_LONGEST + 1] = row[1]
    following[_LONGEST + 2] = row[2]


@kernel
def row_of(tokens: NDArray[np.int32]) -> Hashes:
    """The row of the text `tokens` int32 [n]; O(1), for only its end counts."""
    row = np.zeros(ROW, np.uint64)
    following = np.empty_like(row)
    for token in tokens[-(_LONGEST + 2) :]:
        if token == UNKNOWN:
            row[:] = 0
            continue
        advance(row, token, following)
        row, following = following, row
    return row


@kernel
def key_of(row: Hashes, suffix: int, space: int) -> np.uint64:
    """What the suffix, a number below NUM_SUFFIXES, is filed under in `space`."""
    key = row[_PLACES[suffix]] + np.uint64(suffix + 1) * _A + np.uint64(space) * _C
    key = (key ^ (key >> _SHIFT)) * _B
    key = (key ^ (key >> _SHIFT)) * _A
    return key ^ (key >> np.uint64(32))
