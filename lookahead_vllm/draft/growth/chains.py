"""A trained drafter's chain and its alternatives: candidates by their place in the tree.

The drafter proposes NUM_ALTERNATIVES tokens for each of the next K places of a text. The first ones
are its chain, and each further proposal follows the first one before it. So a node of a draft tree
is on the chain if all tokens on its path are the chain's.

Evidence from the drafter has its own kinds, by depth, rank and gap, and so its own acceptance
rates; it takes the place of the evidence that the model's earlier choices give.
"""

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.growth.candidates import CHOSEN, MAX_ALL_CANDIDATES, add_candidate
from lookahead_vllm.draft.growth.recycling import NUM_CHOICE_KINDS, NUM_GAPS, NUM_LENGTHS
from lookahead_vllm.draft.jit import Int32s, borrowing_kernel
from lookahead_vllm.draft.progress import GAP, NUM_ALTERNATIVES, PROPOSED
from lookahead_vllm.draft.tree import UNKNOWN

ON_CHAIN = NUM_LENGTHS + 1
"""In place of the longest suffix with a line, for a text that ends on the chain."""

_NUM_DEPTHS = 8
"""Deeper places have the kinds of the deepest one."""
_KINDS_OF_A_DEPTH = 1 + NUM_ALTERNATIVES * NUM_GAPS
NUM_DRAFTED_KINDS = _NUM_DEPTHS * _KINDS_OF_A_DEPTH
"""Kinds of evidence from a drafter; they follow those of `recycling.py`."""


@borrowing_kernel
def _not_drafted(depth: int) -> int:
    """The kind of evidence for a token that the drafter does not propose in its place."""
    return NUM_CHOICE_KINDS + min(depth, _NUM_DEPTHS - 1) * _KINDS_OF_A_DEPTH


@borrowing_kernel
def _kind(depth: int, rank: int, gap: int) -> int:
    return _not_drafted(depth) + 1 + rank * NUM_GAPS + gap


@borrowing_kernel
def is_drafted(kind: int) -> bool:
    """Whether the drafter proposed a token with evidence of this kind."""
    return kind >= NUM_CHOICE_KINDS and (kind - NUM_CHOICE_KINDS) % _KINDS_OF_A_DEPTH > 0


def initial_rates() -> NDArray[np.float64]:
    """float64 [NUM_DRAFTED_KINDS]: the acceptance rate of each kind before the first trial."""
    rates = np.full(NUM_DRAFTED_KINDS, 0.02)
    for depth in range(_NUM_DEPTHS):
        for gap in range(NUM_GAPS):
            best, others = (0.35, 0.5, 0.65, 0.85)[gap], (0.25, 0.15, 0.06, 0.02)[gap]
            for rank in range(NUM_ALTERNATIVES):
                kind = _kind.py_func(depth, rank, gap) - NUM_CHOICE_KINDS
                rates[kind] = others / rank if rank else best
    return rates


@borrowing_kernel
def follow_chain(chain: Int32s, place: int, token: int) -> int:
    """The place after `token`: the index of the chain's next token, or UNKNOWN off the chain.

    `chain` is int32 [K, NUM_ALTERNATIVES, 2]; `place` is that of the text before the token.
    """
    if place < 0 or place >= len(chain) or chain[place, 0, PROPOSED] != token:
        return UNKNOWN
    return place + 1


@borrowing_kernel
def find_drafted(
    chain: Int32s, place: int, evidence: Int32s, longest: int, size: int
) -> tuple[int, int]:
    """Add the drafter's proposals for a place to the `size` candidates found so far.

    Parameters
    ----------
    longest : int
        The longest suffix with a line of the model's choices.

    Returns
    -------
    int, int
        ON_CHAIN, or `longest` in a place for which the drafter proposes nothing; the new size.
    """
    if place < 0 or place >= len(chain) or chain[place, 0, PROPOSED] == UNKNOWN:
        return longest, size
    for i in range(size):
        evidence[CHOSEN, i] = _not_drafted(place)
    for rank in range(NUM_ALTERNATIVES):
        token = chain[place, rank, PROPOSED]
        at, size = add_candidate(token, evidence, size, True, MAX_ALL_CANDIDATES)
        evidence[CHOSEN, at] = _kind(place, rank, chain[place, rank, GAP])
    return ON_CHAIN, size
