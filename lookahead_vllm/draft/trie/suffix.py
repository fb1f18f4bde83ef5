"""Rolling hashes of the suffixes of a text, by which the text is looked up.

The hashes of a text are uint64 [NUM_HASHES]: entry k is the hash of its last k tokens, for k up to
the longest of ORDERS; two more entries leave out the last token, and one is of the whole answer and
the prompt's last PROMPT_END tokens. Adding a token takes O(NUM_HASHES), whatever the text's length,
and the hashes of a tree's node are made from its parent's. The hashes of an empty text are zeros,
so a suffix that is longer than the text matches only at the beginning of a text.

The whole answer tells repeated requests apart from others: chat templates end all prompts alike,
and an answer may repeat itself for longer than any suffix. A request's own text is inserted without
it, because it would never match.

The two sparse suffixes, which leave out the last token, match again in a text that is copied with
one word changed. Source: sparse contexts in context mixing compressors (PAQ).
"""

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import borrowing_kernel, kernel
from lookahead_vllm.draft.tree import UNKNOWN

Hashes = NDArray[np.uint64]

ORDERS = (1, 2, 3, 5, 9, 16)
"""Lengths of the contiguous suffixes, in tokens."""

NUM_SPARSE = 2
"""Sparse suffixes: the last token but one, and the two tokens before the last one."""

WHOLE = len(ORDERS)
"""The number of the whole answer among the suffixes: the longest contiguous one."""

NUM_CONTIGUOUS = WHOLE + 1
NUM_SUFFIXES = NUM_CONTIGUOUS + NUM_SPARSE

PROMPT_END = 64
"""Tokens of the prompt that belong to the whole answer."""

_LONGEST = ORDERS[-1]
CONTEXT = _LONGEST + 1
"""The tokens before a place on which its suffixes depend, but for the whole answer."""
NUM_HASHES = _LONGEST + 1 + NUM_SPARSE + 1
_WHOLE_ENTRY = NUM_HASHES - 1

_A, _B, _C = (
    np.uint64(m) for m in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F)
)  # odd, with bits well spread
_ENTRIES = np.array([*ORDERS, _WHOLE_ENTRY, _LONGEST + 1, _LONGEST + 2])
"""Of each suffix in a text's hashes."""
_SHIFT = np.uint64(29)


def empty_hashes() -> Hashes:
    """The hashes of a text without a token."""
    return np.zeros(NUM_HASHES, np.uint64)


@borrowing_kernel
def advance(hashes: Hashes, token: int, result: Hashes) -> None:
    """Write the hashes of the text after one more token to `result`, which is another array."""
    mixed = (np.uint64(token) + np.uint64(1)) * _A
    mixed ^= mixed >> _SHIFT
    for k in range(_LONGEST):
        result[k + 1] = hashes[k] * _B + mixed
    result[0] = 0
    result[_LONGEST + 1] = hashes[1]
    result[_LONGEST + 2] = hashes[2]
    result[_WHOLE_ENTRY] = hashes[_WHOLE_ENTRY] * _B + mixed


@kernel
def hashes_of(tokens: NDArray[np.int32]) -> Hashes:
    """The hashes after the prompt `tokens` int32 [n]; O(1), because only its end counts."""
    hashes = np.zeros(NUM_HASHES, np.uint64)
    result = np.empty_like(hashes)
    for token in tokens[-PROMPT_END:]:
        if token == UNKNOWN:
            hashes[:] = 0
            continue
        advance(hashes, token, result)
        hashes, result = result, hashes
    return hashes


@borrowing_kernel
def hash_in_space(hashes: Hashes, suffix: int, space: int) -> np.uint64:
    """The hash of a text's suffix, a number below NUM_SUFFIXES, in one space of the trie."""
    key = hashes[_ENTRIES[suffix]] + np.uint64(suffix + 1) * _A + np.uint64(space) * _C
    key = (key ^ (key >> _SHIFT)) * _B
    key = (key ^ (key >> _SHIFT)) * _A
    return key ^ (key >> np.uint64(32))
