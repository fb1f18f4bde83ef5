"""What the model said at verified nodes, accepted or not: candidates for the same context again.

Source: Token Recycling (Luo et al., 2024), where the likeliest tokens after each token are kept.
Here they are kept after the last one, two and three tokens, with how sure the model was, and at
the cells of a lookahead branch, too, so that its n-grams are among them.

A hash table of lines of 64 bytes: one is what was said after a suffix last. Whatever was there
goes, so that nothing has to be pruned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.trie.candidates import CHOSEN, place
from lookahead_vllm.draft.trie.suffix import Hashes, advance, key_of
from lookahead_vllm.draft.trie.table import NO_SPACE

NUM_CHOICES = 8
"""Tokens that a line holds, likeliest first."""
NUM_LENGTHS = 3
"""Suffixes of so many lengths are kept: the first of `suffix.ORDERS`, 1, 2 and 3."""

NUM_LINES = 1 << 17  # 8 MiB

# Columns of a line: the space and a part of the suffix's hash, by which it is known; how sure the
# model was, 2 bits for each choice; whether it was asked at a cell of a window; the choices.
_SPACE, _HASH, _SURENESS, _AT_CELL, _FIRST = range(5)
_LINE = 16

_GAPS = (0.5, 1.5, 3.0)  # between a logit and the best one; of the best one, and the second
NUM_GAPS = len(_GAPS) + 1

NOT_LISTED = 1  # and the next ones: a line of each length that does not have the token
_LISTED = NOT_LISTED + NUM_LENGTHS
NUM_CHOICE_KINDS = _LISTED + NUM_LENGTHS * NUM_CHOICES * NUM_GAPS * 2
"""How many kinds of evidence a line gives; 0 is none."""


@kernel
def _kind(length: int, rank: int, gap: int) -> int:
    """And the next one: at a cell of a window."""
    return _LISTED + 2 * ((length * NUM_CHOICES + rank) * NUM_GAPS + gap)


def first_rates() -> NDArray[np.float64]:
    """float64 [NUM_CHOICE_KINDS]: what evidence of each kind is believed until it was tried."""
    rates = np.full(NUM_CHOICE_KINDS, 0.02)
    for rank in range(NUM_CHOICES):
        for gap in range(NUM_GAPS):
            best = (0.3, 0.4, 0.55, 0.75)[gap]
            others = (0.2, 0.12, 0.05, 0.02)[gap] / max(rank, 1)
            for length in range(NUM_LENGTHS):
                kind = _kind.py_func(length, rank, gap)
                rates[kind : kind + 2] = others if rank else best
    return rates


def make_lines(num_lines: int = NUM_LINES) -> Int32s:
    """A table, empty: int32 [num_lines, 16]."""
    return np.zeros((num_lines, _LINE), np.int32)


@kernel
def is_from_cell(kind: int) -> bool:
    """Whether evidence of this kind was found at a cell of a window."""
    return kind >= _LISTED and (kind - _LISTED) % 2 == 1


@kernel
def _line_of(lines: Int32s, space: int, row: Hashes, length: int) -> tuple[np.int64, np.int32]:
    key = key_of(row, length, space)
    line = np.int64(((key >> np.uint64(32)) * np.uint64(len(lines))) >> np.uint64(32))
    return line, np.int32(key & np.uint64(0x7FFFFFFF))


@kernel
def find_choices(
    lines: Int32s, space: int, row: Hashes, found: Int32s, size: int, most: int
) -> tuple[int, int]:
    """What the model said after the suffixes of a text, the longest first.

    Parameters
    ----------
    found : int32 [MAX_CANDIDATES, NUM_COLUMNS]
        What was found elsewhere, `size` of them; gets more, `most` at most, and the evidence.

    Returns
    -------
    int, int
        The longest suffix of which there is a line, 0 for none, and the new size.
    """
    if space == NO_SPACE:
        return 0, size
    longest = 0
    for length in range(NUM_LENGTHS - 1, -1, -1):
        line, name = _line_of(lines, space, row, length)
        if lines[line, _SPACE] != space or lines[line, _HASH] != name:
            continue
        longest = max(longest, length + 1)
        for rank in range(NUM_CHOICES):
            token = lines[line, _FIRST + rank]
            if token < 0:
                break
            at, size = place(token, found, size, True, most)
            if at >= 0 and found[at, CHOSEN] == 0:
                gap = lines[line, _SURENESS] >> (2 * rank) & 3
                found[at, CHOSEN] = _kind(length, rank, gap) + lines[line, _AT_CELL]
    if longest:
        for i in range(size):
            if found[i, CHOSEN] == 0:
                found[i, CHOSEN] = NOT_LISTED + longest - 1
    return longest, size


@kernel
def recycle(
    lines: Int32s,
    spaces: Int32s,
    roots: Hashes,
    tokens: Int32s,
    parents: Int32s,
    firsts: Int64s,
    grown: Int64s,
    at_roots: Int32s,
    at_nodes: Int32s,
    gaps: NDArray[np.float32],
) -> None:
    """Keep what the model said at every root and node of a step's trees.

    Parameters
    ----------
    spaces : int32 [t]
        Whose lines each tree writes.
    roots : uint64 [t, ROW]
        The rows of the texts that end in the roots.
    tokens, parents : int32 [n]
        The nodes.
    firsts : int64 [t + 1]
        The first node of each tree.
    grown : int64 [t]
        The nodes of each tree from this one on are there for the cells of a window alone.
    at_roots, at_nodes : int32 [t, NUM_CHOICES], int32 [n, NUM_CHOICES]
        The likeliest tokens, best first.
    gaps : float32 [t + n, NUM_CHOICES]
        How far their logits are below the best one, the roots' first.
    """
    widest = np.int64(0)
    for tree in range(len(spaces)):
        widest = max(widest, firsts[tree + 1] - firsts[tree])
    rows = np.empty((widest + 1, roots.shape[1]), np.uint64)
    for tree, space in enumerate(spaces):
        if space == NO_SPACE:
            continue
        rows[0] = roots[tree]
        _keep(lines, space, rows[0], at_roots[tree], gaps[tree], 0)
        for node in range(firsts[tree], firsts[tree + 1]):
            place = node - firsts[tree]
            advance(rows[parents[node] + 1], tokens[node], rows[place + 1])
            at_cell = 1 if place >= grown[tree] else 0
            _keep(lines, space, rows[place + 1], at_nodes[node], gaps[len(spaces) + node], at_cell)


@kernel
def _keep(
    lines: Int32s, space: int, row: Hashes, said: Int32s, gaps: NDArray[np.float32], at_cell: int
) -> None:
    sureness = np.int64(0)
    for rank in range(NUM_CHOICES):
        gap = gaps[rank] if rank else gaps[1]
        level = 0
        for bound in _GAPS:
            level += 1 if gap >= bound else 0
        sureness |= np.int64(level) << (2 * rank)
    for length in range(NUM_LENGTHS):
        line, name = _line_of(lines, space, row, length)
        here = lines[line]
        # After a single token, what was said in a real text is the better guess.
        if at_cell and length == 0 and here[_SPACE] == space and here[_HASH] == name:
            continue
        here[_SPACE], here[_HASH], here[_AT_CELL] = space, name, at_cell
        here[_SURENESS] = sureness
        for rank in range(NUM_CHOICES):
            here[_FIRST + rank] = said[rank]
