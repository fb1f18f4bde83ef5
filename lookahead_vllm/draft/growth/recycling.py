"""The model's choices at verified nodes, accepted or not: candidates where the context recurs.

Source: Token Recycling (Luo et al., 2024), which keeps the likeliest tokens after each token. Here
they are kept after the last one, two and three tokens, with the model's confidence. The cells of a
lookahead branch are verified nodes, too, so its n-grams are among them.

The choices are in a hash table of lines of 64 bytes. A line holds the latest choices after a
suffix. A new line replaces the old one in its place, so nothing has to be pruned.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.growth.candidates import CHOSEN, add_candidate
from lookahead_vllm.draft.instructions import prefetch
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.draft.trie.suffix import Hashes, advance, hash_in_space
from lookahead_vllm.draft.trie.table import NO_SPACE

NUM_CHOICES = 8
"""Tokens of a line, likeliest first."""
NUM_LENGTHS = 3
"""Lengths of suffixes that have lines: the first of `suffix.ORDERS`, 1, 2 and 3."""

NUM_LINES = 1 << 17  # 8 MiB

# Columns of a line: the space and a part of the suffix's hash, which identify the line; the
# confidence, 2 bits for each choice; 1 for a cell of a window; then the choices.
_SPACE, _HASH, _CONFIDENCE, _AT_CELL, _FIRST = range(5)
_LINE = 16

# Columns of what the lines were before a step, behind those of a line: its number, and the _HASH
# that it has after the step.
_INDEX, _NEW_HASH = _LINE, _LINE + 1

GAPS = (0.5, 1.5, 3.0)
"""Bounds between the classes of the distance from a logit to the best one; for the best one, to the
second."""
NUM_GAPS = len(GAPS) + 1

NOT_LISTED = 1  # of a token in no line, plus the index of the longest suffix that has a line
_LISTED = NOT_LISTED + NUM_LENGTHS
NUM_CHOICE_KINDS = _LISTED + NUM_LENGTHS * NUM_CHOICES * NUM_GAPS * 2
"""Kinds of evidence that a line gives; 0 is no evidence."""


class ChoiceTrees(NamedTuple):
    """The trees of a step at whose roots and nodes the model made choices."""

    spaces: Int32s
    """int32 [t]: the space in which each tree's choices are kept."""
    roots: Hashes
    """uint64 [t, NUM_HASHES]: of the texts that end in the roots."""
    tokens: Int32s
    """int32 [n], as `parents`."""
    parents: Int32s
    firsts: Int64s
    """int64 [t + 1]: the first node of each tree, and n."""
    num_grown: Int64s
    """int64 [t]: in each tree, nodes from this index on are only cells of a window."""


class ModelChoices(NamedTuple):
    """The model's likeliest tokens, best first."""

    tokens: Int32s
    """int32 [m, NUM_CHOICES]: of each row of logits."""
    gaps: NDArray[np.float32]
    """float32 [m, NUM_CHOICES]: how far each logit is below the best one."""
    roots: Int64s
    """int64 [t]: the row of each root. Its nodes' rows follow, in order."""


@borrowing_kernel
def _kind(length: int, rank: int, gap: int) -> int:
    """The kind of evidence at a node; the next number is the same at a cell of a window."""
    return _LISTED + 2 * ((length * NUM_CHOICES + rank) * NUM_GAPS + gap)


def initial_rates() -> NDArray[np.float64]:
    """float64 [NUM_CHOICE_KINDS]: the acceptance rate of each kind before the first trial."""
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
    """An empty table: int32 [num_lines, 16]."""
    return np.zeros((num_lines, _LINE), np.int32)


def new_replaced(num_rows: int) -> Int32s:
    """Room for the lines that choices in so many rows of logits replace, as they were: int32 [m,
    18], for roots and nodes in order."""
    return np.empty((NUM_LENGTHS * num_rows, _LINE + 2), np.int32)


@borrowing_kernel
def is_listed(kind: int) -> bool:
    """Whether a line holds the token with evidence of this kind."""
    return _LISTED <= kind < NUM_CHOICE_KINDS


@borrowing_kernel
def is_from_cell(kind: int) -> bool:
    """Whether the line is of a cell of a window."""
    return is_listed(kind) and (kind - _LISTED) % 2 == 1


@borrowing_kernel
def _line_of(lines: Int32s, space: int, hashes: Hashes, length: int) -> tuple[np.int64, np.int32]:
    """The index of the suffix's line, and the _HASH that it has."""
    key = hash_in_space(hashes, length, space)
    line = np.int64(((key >> np.uint64(32)) * np.uint64(len(lines))) >> np.uint64(32))
    return line, np.int32(key & np.uint64(0x7FFFFFFF))


@borrowing_kernel
def look_up_choices(lines: Int32s, space: int, hashes: Hashes) -> None:
    """Have the memory fetch the lines of a text's suffixes."""
    if space != NO_SPACE:
        for length in range(NUM_LENGTHS):
            prefetch(lines[_line_of(lines, space, hashes, length)[0]], 0)


@borrowing_kernel
def find_choices(
    lines: Int32s, space: int, hashes: Hashes, evidence: Int32s, size: int, max_size: int
) -> tuple[int, int]:
    """Add the model's choices after the suffixes of a text to the candidates, the longest first.

    Parameters
    ----------
    evidence : int32 [NUM_ROWS, MAX_ALL_CANDIDATES + 1]
        The `size` candidates found so far; there will be `max_size` at most, and row CHOSEN is
        filled.

    Returns
    -------
    int, int
        The longest suffix that has a line, 0 for none, and the new size.
    """
    if space == NO_SPACE:
        return 0, size
    longest = 0
    for length in range(NUM_LENGTHS - 1, -1, -1):
        line, hash_bits = _line_of(lines, space, hashes, length)
        if lines[line, _SPACE] != space or lines[line, _HASH] != hash_bits:
            continue
        longest = max(longest, length + 1)
        for rank in range(NUM_CHOICES):
            token = lines[line, _FIRST + rank]
            if token < 0:
                break
            at, size = add_candidate(token, evidence, size, True, max_size)
            if evidence[CHOSEN, at] == 0:
                gap = lines[line, _CONFIDENCE] >> (2 * rank) & 3
                evidence[CHOSEN, at] = _kind(length, rank, gap) + lines[line, _AT_CELL]
    if longest:
        for i in range(size):
            if evidence[CHOSEN, i] == 0:
                evidence[CHOSEN, i] = NOT_LISTED + longest - 1
    return longest, size


@kernel
def find_lines(lines: Int32s, trees: ChoiceTrees, replaced: Int32s) -> int:
    """Find the lines that the model's choices at every root and node of a step's trees replace.

    Trees whose space is NO_SPACE are skipped. Fills `replaced`, see `new_replaced`, and returns the
    number of its rows. IndexError if it has no room for them.
    """
    trees = ChoiceTrees(*trees)
    spaces, tokens, parents, firsts = trees.spaces, trees.tokens, trees.parents, trees.firsts
    max_size = np.int64(0)
    for tree in range(len(spaces)):
        max_size = max(max_size, firsts[tree + 1] - firsts[tree])
    if len(replaced) < NUM_LENGTHS * (len(spaces) + len(tokens)):
        raise IndexError("there is no room for the lines")
    hashes = np.empty((max_size + 1, trees.roots.shape[1]), np.uint64)  # row i + 1 is node i's
    size = 0
    for tree, space in enumerate(spaces):
        if space == NO_SPACE:
            continue
        begin = size
        hashes[0] = trees.roots[tree]
        size = _find(lines, space, hashes[0], replaced, size)
        for node in range(firsts[tree], firsts[tree + 1]):
            place = node - firsts[tree]
            advance(hashes[parents[node] + 1], tokens[node], hashes[place + 1])
            size = _find(lines, space, hashes[place + 1], replaced, size)
        for row in range(begin, size):  # the memory has fetched them meanwhile
            for column in range(_LINE):
                replaced[row, column] = lines[replaced[row, _INDEX], column]
    return size


@borrowing_kernel
def _find(lines: Int32s, space: int, hashes: Hashes, replaced: Int32s, size: int) -> int:
    """Append the numbers of a text's lines to `replaced`, which has this `size`; returns its new
    one."""
    for length in range(NUM_LENGTHS):
        line, replaced[size, _NEW_HASH] = _line_of(lines, space, hashes, length)
        replaced[size, _INDEX] = line
        prefetch(lines[line], 0)
        size += 1
    return size


@kernel
def keep_choices(
    lines: Int32s, trees: ChoiceTrees, choices: ModelChoices, replaced: Int32s
) -> None:
    """Keep the model's choices at every root and node of a step's trees in the lines that were
    found; not those of nodes whose first choice is UNKNOWN."""
    trees, choices = ChoiceTrees(*trees), ModelChoices(*choices)
    found = 0
    for tree, space in enumerate(trees.spaces):
        if space == NO_SPACE:
            continue
        for place in range(-1, trees.firsts[tree + 1] - trees.firsts[tree]):
            row = choices.roots[tree] + 1 + place
            if place < 0 or choices.tokens[row, 0] != UNKNOWN:
                at_cell = 1 if place >= trees.num_grown[tree] else 0
                _keep(lines, space, choices, row, at_cell, replaced, found)
            found += NUM_LENGTHS


@kernel
def swap_lines(lines: Int32s, replaced: Int32s, restore: bool) -> None:
    """Take back what `keep_choices` has written if `restore`, else write it again; in turns.

    A row has what is not in its line at present. A step may replace a line several times, so what
    it did last is taken back first.
    """
    last = len(replaced) - 1
    for i in range(len(replaced)):
        row = replaced[last - i if restore else i]
        line = lines[row[_INDEX]]
        for column in range(_LINE):
            line[column], row[column] = row[column], line[column]


@borrowing_kernel
def _keep(
    lines: Int32s,
    space: int,
    choices: ModelChoices,
    row: int,
    at_cell: int,
    replaced: Int32s,
    found: int,
) -> None:
    """Write the choices in this row to the lines that were found from there on."""
    tokens, gaps = choices.tokens[row], choices.gaps[row]
    confidence = np.int64(0)
    for rank in range(NUM_CHOICES):
        gap = gaps[rank] if rank else gaps[1]
        level = 0
        for bound in GAPS:
            level += 1 if gap >= bound else 0
        confidence |= np.int64(level) << (2 * rank)
    for length in range(NUM_LENGTHS):
        old = replaced[found + length]
        line, hash_bits = lines[old[_INDEX]], old[_NEW_HASH]
        # After a single token, choices in a real text are better than those at a cell.
        if at_cell and length == 0 and line[_SPACE] == space and line[_HASH] == hash_bits:
            continue
        line[_SPACE], line[_HASH], line[_AT_CELL] = space, hash_bits, at_cell
        line[_CONFIDENCE] = confidence
        for rank in range(NUM_CHOICES):
            line[_FIRST + rank] = tokens[rank]
