"""What followed which suffix: the n-gram trie, kept as a hash table of its edges.

Source: Lookahead (Zhao et al., KDD 2024), section 4.2: n-grams of prompts and of answers, the
weight of a branch its frequency, elimination of a prompt's branches, pruning at a capacity.

An edge leads from a suffix (see `suffix.py`) to a token that followed it, and is one slot of 16
bytes. All edges of a suffix stand in one line of the table, 64 bytes, so that whatever followed it
is found with one access to memory. Nothing points to an edge, and that makes the rest
simple:

- A new edge takes the least valuable slot of its line: pruning is gradual, costs the same
  always, and the table never grows.
- An edge belongs to a space: a namespace of answers, or one live request's own text. Eliminating
  a request's text is forgetting the number of its space, and no frequency that another request
  counted on is touched. An edge is found only by who names its space; that is not left to a hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.draft.trie.suffix import NUM_SUFFIXES, Hashes, advance, key_of

# Columns of `Trie.edges`. NAME is a part of the suffix's hash above the number of its space. USE
# is, from below, the token (32 bits), how often it followed (16, saturating), and the time of the
# last one (16).
NAME, USE = range(2)
SPACE_BITS = 0xFFFFFFFF
TOKEN_BITS = 0xFFFFFFFF
COUNT_SHIFT = 32
TIME_SHIFT = 48
MOST = 0xFFFF  # of a count or a time

NO_SPACE = 0
"""The space without an edge: where nothing is inserted and nothing found."""

BYTES_PER_NODE = 16
LINE = 4
"""Slots of a line, 64 bytes: a suffix has all its edges in one line, and so at most 4."""

CLOCK_TICKS = 64  # of the clock, while as many edges are made as there are slots
HALF_LIFE_TICKS = 32  # ticks in which a frequency halves
LIVE_BONUS = 8  # an edge of a live request's own text counts as seen so many times more

_EMPTY = -2  # the value of such a slot

MIN_REGION_LINES = 2048  # lines that a private space is spread over at least: 128 KiB
MAX_LIVE_SPACES = 1 << 12
"""The most spaces of live requests at a time."""

# Slots of `Trie.counters`.
MADE, PRUNED, LAST_PRIVATE, LAST_SHARED, FILLED = range(5)


class Trie:
    """The edges of all n-grams in all spaces, within a fixed number of slots.

    Parameters
    ----------
    max_nodes : int
        How many edges, or the nodes that they lead to, there is room for; rounded down to whole
        lines of 4, which are 64 bytes.

    Attributes
    ----------
    edges : int64 [max_nodes, 2]
        NAME, which is 0 for an empty slot, and USE.
    live : int32 [MAX_LIVE_SPACES, 3]
        The private spaces that are not eliminated, each with the first line of the region where
        its edges are and that region's length in lines: a short text keeps to a small part of
        the table, which then stays in the processor's cache.
    counters : int64 [5]
        Edges made and pruned, the last numbers given to spaces, slots that are not empty.
    """

    def __init__(self, max_nodes: int) -> None:
        lines = max_nodes // LINE
        # Written, not only reserved: the memory that a server takes is there from the start.
        spare = np.full((lines + 1) * LINE * 2, 0, np.int64)  # aligned: a line is one cache line
        first = (-spare.ctypes.data % 64) // 8
        self.edges: Int64s = spare[first : first + lines * LINE * 2].reshape(-1, 2)
        self.live = np.zeros((MAX_LIVE_SPACES, 3), np.int32)
        self.counters: Int64s = np.zeros(5, np.int64)

    @property
    def num_bytes(self) -> int:
        """What the tables take, full or empty."""
        return self.edges.nbytes + self.live.nbytes

    @property
    def num_pruned(self) -> int:
        """Edges that had to go for newer ones, those of eliminated requests not counted."""
        return int(self.counters[PRUNED])

    @property
    def num_filled(self) -> int:
        """Slots that hold an edge, those of eliminated requests counted until they are needed."""
        return int(self.counters[FILLED])

    def recount(self) -> None:
        """Count the filled slots anew: a cache file leaves out those of live requests."""
        self.counters[FILLED] = np.count_nonzero(self.edges[:, NAME])

    def count_edges(self) -> int:
        """Edges that can be found now; looks at every slot."""
        spaces = spaces_of(self.edges)
        alive = (spaces > 0) | ((spaces < 0) & (self.live[-spaces % MAX_LIVE_SPACES, 0] == spaces))
        return int(alive.sum())

    def new_shared(self) -> int:
        """A space for answers: its edges stay until they are pruned."""
        self.counters[LAST_SHARED] += 1
        return int(self.counters[LAST_SHARED])

    def new_private(self, num_tokens: int) -> int:
        """A space for a live request's own text, which is expected to have so many tokens.

        NO_SPACE if there are MAX_LIVE_SPACES of them.
        """
        lines = len(self.edges) // LINE
        region = min(lines, max(MIN_REGION_LINES, num_tokens * NUM_SUFFIXES * 2 // LINE))
        for _ in range(MAX_LIVE_SPACES):
            self.counters[LAST_PRIVATE] = self.counters[LAST_PRIVATE] % (2**31 - 1) + 1
            space = -int(self.counters[LAST_PRIVATE])
            if self.live[-space % MAX_LIVE_SPACES, 0] == 0:
                first = -space * 0x9E3779B1 % (lines - region + 1)
                self.live[-space % MAX_LIVE_SPACES] = space, first, region
                return space
        return NO_SPACE

    def is_live(self, space: int) -> bool:
        """Whether this is a private space that is not eliminated."""
        return space < 0 and bool(self.live[-space % MAX_LIVE_SPACES, 0] == space)

    def eliminate(self, space: int) -> None:
        """End a private space, in O(1): its edges are never found again, and the first to go."""
        if self.is_live(space):
            self.live[-space % MAX_LIVE_SPACES] = 0

    def insert(self, space: int, row: Hashes, tokens: Int32s) -> None:
        """Count every n-gram that ends in `tokens` int32 [n], which follow the text of `row`.

        `row` is uint64 [ROW] and becomes that of the longer text. O(n); all can be found at once.
        No n-gram reaches across UNKNOWN.
        """
        _insert_text(self.edges, self.live, self.counters, space, row, tokens)

    def followers(self, space: int, row: Hashes, suffix: int) -> list[tuple[int, int]]:
        """The tokens that followed the suffix and how often each did, the latest first."""
        first, lines = region_of(self.edges, self.live, space)
        name, slot = locate(first, lines, space, row, suffix)
        slots = matches(self.edges, name, slot)
        uses = self.edges[slot : slot + LINE, USE].tolist()
        held = [use for i, use in enumerate(uses) if slots >> i & 1]
        return [(use & TOKEN_BITS, use >> COUNT_SHIFT & MOST) for use in held]


def spaces_of(edges: Int64s) -> Int32s:
    """The space of each edge: above 0 one of answers, below 0 a request's own, 0 an empty slot."""
    return edges[:, NAME].astype(np.int32)  # the lower half


def count_by_space(edges: Int64s, spaces: Sequence[int]) -> Int64s:
    """How many edges each of these spaces of answers has, int64 [n]; looks at every slot."""
    counts: Int64s = _count_by_space(edges, np.array(spaces, np.int64))
    return counts


@kernel
def _count_by_space(edges: Int64s, spaces: Int64s) -> Int64s:
    size = 16
    while size < 4 * len(spaces):
        size *= 2
    places = np.full(size, -1, np.int64)  # a hash table with open addressing
    for i, space in enumerate(spaces):
        at = space * 0x9E3779B1 & (size - 1)
        while places[at] >= 0:
            at = (at + 1) & (size - 1)
        places[at] = i
    counts = np.zeros(len(spaces), np.int64)
    for slot in range(len(edges)):
        space = np.int64(np.int32(edges[slot, NAME] & SPACE_BITS))
        if space > 0:
            at = space * 0x9E3779B1 & (size - 1)
            while places[at] >= 0:
                if spaces[places[at]] == space:
                    counts[places[at]] += 1
                    break
                at = (at + 1) & (size - 1)
    return counts


def counts_of(edges: Int64s) -> Int64s:
    """How often each edge was followed."""
    return edges[:, USE] >> COUNT_SHIFT & MOST


@kernel
def region_of(edges: Int64s, live: Int32s, space: int) -> tuple[np.int64, np.int64]:
    """The first line of the part of the table that the space is spread over, and its length."""
    if space < 0:
        return np.int64(live[-space % MAX_LIVE_SPACES, 1]), np.int64(
            live[-space % MAX_LIVE_SPACES, 2]
        )
    return np.int64(0), np.int64(len(edges) // LINE)


@kernel
def locate(
    first: int, lines: int, space: int, row: Hashes, suffix: int
) -> tuple[np.int64, np.int64]:
    """The name of the suffix's edges and the first slot of their line, within that region."""
    key = key_of(row, suffix, space)
    line = first + np.int64(((key >> np.uint64(32)) * np.uint64(lines)) >> np.uint64(32))
    return np.int64(key << np.uint64(32)) | (np.int64(space) & SPACE_BITS), line * LINE


@kernel
def matches(edges: Int64s, name: int, slot: int) -> np.int64:
    """Which slots of the line hold an edge of this name, as bits: the lowest is the first slot.

    The edge that was counted last stands first.
    """
    return (  # without a branch
        np.int64(edges[slot, NAME] == name)
        | np.int64(edges[slot + 1, NAME] == name) << 1
        | np.int64(edges[slot + 2, NAME] == name) << 2
        | np.int64(edges[slot + 3, NAME] == name) << 3
    )


@kernel
def _value(edges: Int64s, live: Int32s, slot: int, now: int) -> int:
    """How much an edge is worth keeping: empty, eliminated, seldom, long ago are worth little."""
    name = edges[slot, NAME]
    if name == 0:
        return _EMPTY
    space = np.int64(np.int32(name & SPACE_BITS))
    bonus = 0
    if space < 0:
        if live[-space % MAX_LIVE_SPACES, 0] != space:
            return -1
        bonus = LIVE_BONUS
    use = edges[slot, USE]
    age = (now - (use >> TIME_SHIFT)) & MOST
    weight = ((use >> COUNT_SHIFT & MOST) + bonus) >> min(age // HALF_LIFE_TICKS, 31)
    return (weight << 16) + MOST - age


@kernel
def count(edges: Int64s, live: Int32s, counters: Int64s, name: int, line: int, token: int) -> None:
    """`token` followed the suffix of that name once more; its edge becomes the first of them."""
    now = counters[MADE] // max(1, len(edges) // CLOCK_TICKS) & MOST
    first = edge = -1
    for slot in range(line, line + LINE):
        if edges[slot, NAME] == name:
            if first < 0:
                first = slot
            if edges[slot, USE] & TOKEN_BITS == token:
                edge = slot
                break
    seen = 0
    if edge >= 0:
        use = edges[edge, USE]
        age = (now - (use >> TIME_SHIFT)) & MOST
        seen = (use >> COUNT_SHIFT & MOST) >> min(age // HALF_LIFE_TICKS, 31)
    else:
        edge = line
        least = _value(edges, live, line, now)
        for slot in range(line + 1, line + LINE):
            value = _value(edges, live, slot, now)
            if value < least:
                edge, least = slot, value
        counters[MADE] += 1
        counters[PRUNED] += least >= 0
        counters[FILLED] += least == _EMPTY
    use = now << TIME_SHIFT | min(seen + 1, MOST) << COUNT_SHIFT | np.int64(token)
    if 0 <= first < edge:
        edges[edge, NAME], edges[edge, USE] = edges[first, NAME], edges[first, USE]
        edge = first
    edges[edge, NAME], edges[edge, USE] = name, use


@kernel
def _insert_text(
    edges: Int64s, live: Int32s, counters: Int64s, space: int, row: Hashes, tokens: Int32s
) -> None:
    following = np.empty_like(row)
    first, lines = region_of(edges, live, space)
    for token in tokens:
        if token == UNKNOWN:
            row[:] = 0
            continue
        if space != NO_SPACE:
            for suffix in range(NUM_SUFFIXES):
                name, slot = locate(first, lines, space, row, suffix)
                count(edges, live, counters, name, slot, token)
        advance(row, token, following)
        row[:] = following
