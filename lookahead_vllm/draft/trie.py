"""What followed which suffix: the n-gram trie, kept as a hash table of its edges.

Source: Lookahead (Zhao et al., KDD 2024), section 4.2: n-grams of prompts and of answers, the
weight of a branch its frequency, elimination of a prompt's branches, pruning at a capacity.

An edge leads from a suffix (see `suffix.py`) to a token that followed it, and is one slot of 16
bytes. All edges of a suffix stand in one window of the table, 64 bytes for most, so that whatever
followed it is found with one access to memory. Nothing points to an edge, and that makes the rest
simple:

- A new edge takes the least valuable slot of its window: pruning is gradual, costs the same
  always, and the table never grows.
- An edge belongs to a space: a namespace of answers, or one live request's own text. Eliminating
  a request's text is forgetting the number of its space, and no frequency that another request
  counted on is touched. An edge is found only by who names its space; that is not left to a hash.
"""

from __future__ import annotations

import numpy as np
from numba import njit  # its cache looks at one file: touch the importers of a kernel you change
from numpy.typing import NDArray

from lookahead_vllm.draft.suffix import NUM_SUFFIXES, Hashes, advance, key_of

Ints = NDArray[np.int32]
Counters = NDArray[np.int64]

# Columns of `Trie.edges`.
TAG, TOKEN, SPACE, USE = range(4)
# USE is a saturating count, and in its upper half the time of the last one.
MAX_COUNT = 0xFFFF

NOWHERE = 0
"""The space without an edge: where nothing is inserted and nothing found."""

BYTES_PER_NODE = 16
LINE = 4  # slots in 64 bytes
WINDOWS = np.array([16, 8] + [LINE] * (NUM_SUFFIXES - 2))
"""The most edges of a suffix of each kind: short ones are followed by many tokens."""

STAMPS = 64  # the clock ticks so often while as many edges are made as there are slots
HALF_LIFE = 32  # ticks in which a frequency halves
LIVE_BONUS = 8  # an edge of a live request's own text counts as seen so many times more

LEAST_REGION = 2048  # lines that a private space is spread over at least: 128 KiB

MAX_LIVE = 1 << 12
"""The most spaces of live requests at a time."""

# Slots of `Trie.counters`.
MADE, PRUNED, LAST_PRIVATE, LAST_SHARED = range(4)


class Trie:
    """The edges of all n-grams in all spaces, within a fixed number of slots.

    Parameters
    ----------
    max_nodes : int
        How many edges, or the nodes that they lead to, there is room for; rounded down to whole
        lines of 4, which are 64 bytes.

    Attributes
    ----------
    edges : int32 [max_nodes, 4]
        TAG (a part of the suffix's hash), TOKEN, SPACE (NOWHERE for an empty slot), USE.
    live : int32 [MAX_LIVE, 3]
        The private spaces that are not eliminated, each with the first line of the region where
        its edges are and that region's length in lines: a short text keeps to a small part of
        the table, which then stays in the processor's cache.
    counters : int64 [4]
        Edges made and pruned, the last numbers given to spaces.
    """

    def __init__(self, max_nodes: int) -> None:
        lines = max_nodes // LINE
        spare = np.zeros((lines + 1) * LINE * 4, np.int32)  # aligned: a line is one cache line
        first = (-spare.ctypes.data % 64) // 4
        self.edges: Ints = spare[first : first + lines * LINE * 4].reshape(-1, 4)
        self.live = np.zeros((MAX_LIVE, 3), np.int32)
        self.counters: Counters = np.zeros(4, np.int64)

    @property
    def num_bytes(self) -> int:
        """What the tables take, full or empty."""
        return self.edges.nbytes + self.live.nbytes

    @property
    def num_pruned(self) -> int:
        """Edges that had to go for newer ones, those of eliminated requests not counted."""
        return int(self.counters[PRUNED])

    def count_edges(self) -> int:
        """Edges that can be found now; looks at every slot."""
        spaces = self.edges[:, SPACE]
        alive = (spaces > 0) | ((spaces < 0) & (self.live[-spaces % MAX_LIVE, 0] == spaces))
        return int(alive.sum())

    def new_shared(self) -> int:
        """A space for answers: its edges stay until they are pruned."""
        self.counters[LAST_SHARED] += 1
        return int(self.counters[LAST_SHARED])

    def new_private(self, num_tokens: int) -> int:
        """A space for a live request's own text, which is expected to have so many tokens.

        NOWHERE if there are MAX_LIVE of them.
        """
        lines = len(self.edges) // LINE
        region = min(lines, max(LEAST_REGION, num_tokens * NUM_SUFFIXES * 2 // LINE))
        for _ in range(MAX_LIVE):
            self.counters[LAST_PRIVATE] = self.counters[LAST_PRIVATE] % (2**31 - 1) + 1
            space = -int(self.counters[LAST_PRIVATE])
            if self.live[-space % MAX_LIVE, 0] == 0:
                first = -space * 0x9E3779B1 % (lines - region + 1)
                self.live[-space % MAX_LIVE] = space, first, region
                return space
        return NOWHERE

    def eliminate(self, space: int) -> None:
        """End a private space, in O(1): its edges are never found again, and the first to go."""
        if space < 0 and self.live[-space % MAX_LIVE, 0] == space:
            self.live[-space % MAX_LIVE] = 0

    def insert(self, space: int, row: Hashes, tokens: Ints) -> None:
        """Count every n-gram that ends in `tokens` int32 [n], which follow the text of `row`.

        `row` is uint64 [ROW] and becomes that of the longer text. O(n); all can be found at once.
        """
        _insert_text(self.edges, self.live, self.counters, space, row, tokens)

    def followers(self, space: int, row: Hashes, suffix: int) -> list[tuple[int, int]]:
        """The tokens that followed the suffix and how often each did, the latest first."""
        window, slots = find(self.edges, self.live, space, row, suffix)
        held = [window + i for i in range(WINDOWS[suffix]) if slots >> i & 1]
        return [(int(self.edges[i, TOKEN]), int(self.edges[i, USE] & MAX_COUNT)) for i in held]


@njit(cache=True)
def _window(edges: Ints, live: Ints, space: int, key: np.uint64, size: int) -> np.int64:
    """Where the window of so many slots begins."""
    first, lines = np.int64(0), np.int64(len(edges) // LINE)
    if space < 0:
        first, lines = np.int64(live[-space % MAX_LIVE, 1]), np.int64(live[-space % MAX_LIVE, 2])
    places = np.uint64(lines - size // LINE + 1)
    return (first + np.int64(((key >> np.uint64(32)) * places) >> np.uint64(32))) * LINE


@njit(cache=True)
def find(edges: Ints, live: Ints, space: int, row: Hashes, suffix: int) -> tuple[int, int]:
    """The suffix's window, as its first slot, and which of its slots hold an edge of the suffix.

    The latter is a number whose lowest bit stands for the first slot; the edge that was counted
    last stands first.
    """
    key = key_of(row, suffix, space)
    tag = np.int32(key & np.uint64(0x7FFFFFFF))
    size = WINDOWS[suffix]
    window = _window(edges, live, space, key, size)
    slots = 0
    for i in range(size):  # without a branch: this waits for memory
        same = (edges[window + i, TAG] == tag) & (edges[window + i, SPACE] == space)
        slots |= np.int64(same) << i
    return window, slots


@njit(cache=True)
def _value(edges: Ints, live: Ints, slot: int, now: int) -> int:
    """How much an edge is worth keeping: empty, eliminated, seldom, long ago are worth little."""
    space = edges[slot, SPACE]
    if space == NOWHERE:
        return -2
    bonus = 0
    if space < 0:
        if live[-space % MAX_LIVE, 0] != space:
            return -1
        bonus = LIVE_BONUS
    use = edges[slot, USE]
    age = (now - (use >> 16)) & 0xFFFF
    weight = ((use & MAX_COUNT) + bonus) >> min(age // HALF_LIFE, 31)
    return (weight << 16) + 0xFFFF - age


@njit(cache=True)
def count(
    edges: Ints, live: Ints, counters: Counters, space: int, row: Hashes, suffix: int, token: int
) -> None:
    """`token` followed the suffix once more; the edge becomes the first of its suffix."""
    key = key_of(row, suffix, space)
    tag = np.int32(key & np.uint64(0x7FFFFFFF))
    size = WINDOWS[suffix]
    window = _window(edges, live, space, key, size)
    now = counters[MADE] // max(1, len(edges) // STAMPS) & 0xFFFF
    first = edge = -1
    for slot in range(window, window + size):
        if edges[slot, TAG] == tag and edges[slot, SPACE] == space:
            if first < 0:
                first = slot
            if edges[slot, TOKEN] == token:
                edge = slot
                break
    seen = 0
    if edge >= 0:
        use = edges[edge, USE]
        age = (now - (use >> 16)) & 0xFFFF
        seen = (use & MAX_COUNT) >> min(age // HALF_LIFE, 31)
    else:
        edge = window
        least = _value(edges, live, window, now)
        for slot in range(window + 1, window + size):
            value = _value(edges, live, slot, now)
            if value < least:
                edge, least = slot, value
        counters[MADE] += 1
        counters[PRUNED] += least >= 0
        edges[edge, TAG] = tag
        edges[edge, TOKEN] = token
        edges[edge, SPACE] = space
    edges[edge, USE] = np.int32(now << 16) | min(seen + 1, MAX_COUNT)
    if 0 <= first < edge:
        for column in range(4):
            moved = edges[first, column]
            edges[first, column] = edges[edge, column]
            edges[edge, column] = moved


@njit(cache=True)
def insert_token(
    edges: Ints, live: Ints, counters: Counters, space: int, row: Hashes, token: int
) -> None:
    """Count the n-grams of all lengths that `token` ends."""
    if space != NOWHERE:
        for suffix in range(NUM_SUFFIXES):
            count(edges, live, counters, space, row, suffix, token)


@njit(cache=True)
def _insert_text(
    edges: Ints, live: Ints, counters: Counters, space: int, row: Hashes, tokens: Ints
) -> None:
    following = np.empty_like(row)
    for token in tokens:
        insert_token(edges, live, counters, space, row, token)
        advance(row, token, following)
        row[:] = following
