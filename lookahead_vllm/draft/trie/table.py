"""The n-gram trie, stored as a hash table of its edges: which token followed which suffix.

Source: Lookahead (Zhao et al., KDD 2024), section 4.2: n-grams of prompts and of answers, the
weight of a branch its frequency, elimination of a prompt's branches, pruning at a capacity.

An edge leads from a suffix (see `suffix.py`) to a token that followed it, and takes one slot of 16
bytes. All edges of a suffix are in one line of the table, 64 bytes, so one access to memory finds
every token that followed the suffix. Nothing points to an edge:

- A new edge takes the least valuable slot of its line. Pruning is gradual, its cost is constant,
  and the table never grows.
- An edge belongs to a space: a namespace of answers, or one text, of a live request or kept
  for the next turn of its conversation. Eliminating a text removes the number of its space and
  touches no frequency that another request relies on. An edge matches only within its own space,
  which is compared exactly, not by hash.
"""

import mmap
from typing import NamedTuple

import numpy as np

from lookahead_vllm.draft.instructions import prefetch
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.draft.trie.suffix import (
    CONTEXT,
    NUM_HASHES,
    NUM_SUFFIXES,
    WHOLE,
    Hashes,
    advance,
    hash_in_space,
    hashes_of,
)

# Columns of `Trie.edges`. KEY has the space in its lower 32 bits and a part of the suffix's hash
# above. USE has, from the lowest bit, the token (32 bits), how often it followed (16, saturating)
# and the time at which it followed last (16).
KEY, USE = range(2)
SPACE_MASK = 0xFFFFFFFF
TOKEN_MASK = 0xFFFFFFFF
COUNT_SHIFT = 32
TIME_SHIFT = 48
MAX_UINT16 = 0xFFFF  # the largest count and the largest time

MAX_SPACE = 2**31 - 1
"""The largest number of a space; private ones are negative."""

NO_SPACE = 0
"""The space without edges: nothing is inserted into it and nothing is found in it."""

SLOTS_PER_LINE = 4
"""A suffix has all its edges in one line of 64 bytes, and so at most 4."""

CLOCK_TICKS = 64  # ticks of the clock while as many edges are made as there are slots
HALF_LIFE_TICKS = 32  # ticks in which a frequency halves
LIVE_BONUS = 8  # added to the frequency of an edge of a live request's own text

_EMPTY = -2  # the value of an empty slot
_ELIMINATED = -1  # the value of a slot whose private space was eliminated

MIN_REGION_LINES = 2048  # the fewest lines that a private space is spread over: 128 KiB
PAGE_LINES = (2 << 20) // 64
"""The lines of a huge page."""
MAX_LIVE_SPACES = 1 << 12
"""The most private spaces that are live at a time."""
_SHARED = MAX_LIVE_SPACES
"""The row of all shared spaces in `Trie.live`."""

SLOTS_PER_TOKEN = 2 * NUM_SUFFIXES
"""Slots of a private space for each of its expected tokens: a token adds at most NUM_SUFFIXES - 1
edges, 6 of them new in a usual text, and lines fill unevenly."""

# Slots of `Trie.counters`.
CLOCK, PRUNED, LAST_PRIVATE, LAST_SHARED, FILLED = range(5)


class TrieArrays(NamedTuple):
    """The arrays of a `Trie`, as the kernels use them.

    Kernels that are called from Python take the fields of a NamedTuple as a plain tuple, and build
    the NamedTuple themselves: numba needs 0.7 µs more for each one that comes from Python.
    """

    edges: Int64s
    live: Int32s
    counters: Int64s


class Trie:
    """The edges of all n-grams in all spaces, within a fixed number of slots.

    Parameters
    ----------
    max_nodes : int
        The number of edges, each of which leads to a node; rounded down to whole lines of 4 edges,
        which are 64 bytes.
    text_nodes : int
        Further edges, for private spaces alone. Their memory is allocated as it is used. If 0,
        private spaces share the others.

    Attributes
    ----------
    edges : int64 [max_nodes + text_nodes, 2]
        KEY, which is 0 for an empty slot, and USE.
    live : int32 [MAX_LIVE_SPACES + 1, 3]
        The private spaces that are not eliminated, each with the first line of its region and the
        region's length in lines. All edges of the space are in its region, so a short text uses a
        small part of the table, which stays in the processor's cache. The last row has the region
        of the shared spaces.
    counters : int64 [5]
        The CLOCK, in edges that were made; PRUNED edges, the LAST_PRIVATE and LAST_SHARED space
        numbers, FILLED slots.
    """

    def __init__(self, max_nodes: int, text_nodes: int = 0) -> None:
        lines, text_lines = max_nodes // SLOTS_PER_LINE, text_nodes // SLOTS_PER_LINE
        # Not from the allocator, which may write to all of it. It begins with a page, so a line is
        # one cache line.
        size = (lines + text_lines) * SLOTS_PER_LINE * 16
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # lines are read at random: a third of the time
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.edges: Int64s = np.frombuffer(memory, np.int64).reshape(-1, 2)
        self.answers: Int64s = self.edges[: lines * SLOTS_PER_LINE]
        """The edges that shared spaces may have."""
        # Written, not only reserved, so that the memory is allocated when the server starts.
        self.answers[:] = 0
        self._has_page = np.zeros(-(-(lines + text_lines) // PAGE_LINES), np.bool_)
        self._has_page[: lines // PAGE_LINES] = True
        self.live: Int32s = np.zeros((MAX_LIVE_SPACES + 1, 3), np.int32)
        self.live[_SHARED, 2] = lines
        self._text_lines = (lines, text_lines) if text_lines else (0, max(1, lines * 3 // 4))
        """The first line of the private spaces, and the number of their lines."""
        self.counters: Int64s = np.zeros(5, np.int64)

    @property
    def arrays(self) -> tuple[Int64s, Int32s, Int64s]:
        """The fields of TrieArrays."""
        return self.edges, self.live, self.counters

    @property
    def num_bytes(self) -> int:
        """The memory of the tables, which does not depend on how full they are."""
        return self.edges.nbytes + self.live.nbytes

    @property
    def num_pruned(self) -> int:
        """Edges that were replaced by newer ones; edges of eliminated spaces do not count."""
        return int(self.counters[PRUNED])

    @property
    def num_filled(self) -> int:
        """Slots that hold an edge; edges of eliminated spaces count until they are replaced."""
        return int(self.counters[FILLED])

    def recount(self) -> None:
        """Count the filled slots again: a cache file leaves out the edges of live requests."""
        self.counters[FILLED] = np.count_nonzero(self.edges[:, KEY])

    def new_shared(self) -> int:
        """A space for answers. Its edges stay until they are pruned.

        NO_SPACE if all numbers are used; a cache file continues them after a restart.
        """
        if self.counters[LAST_SHARED] >= MAX_SPACE:
            return NO_SPACE
        self.counters[LAST_SHARED] += 1
        return int(self.counters[LAST_SHARED])

    def new_private(self, num_tokens: int, may_overlap: bool = True) -> int:
        """A space for a text of about `num_tokens` tokens.

        NO_SPACE if MAX_LIVE_SPACES are live, or if it would overlap a live one and may not. Without
        `text_nodes`, all private spaces are in the first three quarters of the table, so that texts
        never displace the answers in the last one.
        """
        start, lines = self._text_lines
        region = min(lines, max(MIN_REGION_LINES, num_tokens * SLOTS_PER_TOKEN // SLOTS_PER_LINE))
        gap = self._gap(region)
        if gap is None and not may_overlap:
            return NO_SPACE
        for _ in range(MAX_LIVE_SPACES):
            self.counters[LAST_PRIVATE] = self.counters[LAST_PRIVATE] % MAX_SPACE + 1
            space = -int(self.counters[LAST_PRIVATE])
            if self.live[-space % MAX_LIVE_SPACES, 0] == 0:
                overlapping = start + -space * 0x9E3779B1 % (lines - region + 1)
                first = overlapping if gap is None else gap
                self.live[-space % MAX_LIVE_SPACES] = space, first, region
                return space
        return NO_SPACE

    def _gap(self, region: int) -> int | None:
        """The first of `region` lines that no live private space has."""
        start, lines = self._text_lines
        taken = self.live[np.flatnonzero(self.live[:_SHARED, 0]), 1:].astype(np.int64)
        taken = taken[np.argsort(taken[:, 0])]
        ends = np.maximum.accumulate(np.append(start, taken.sum(1)))
        gaps = np.append(taken[:, 0], start + lines) - ends
        fitting = np.flatnonzero(gaps >= region)
        return int(ends[fitting[0]]) if len(fitting) else None

    def allocate(self, space: int) -> bool:
        """Allocate a page of memory of a private space; False if it has all.

        The first text in a region would wait for all of its pages at once: the kernel fills each
        with zeros, in 0.2 ms, or in 4 ms on a virtual machine.
        """
        first, lines = self.live[-space % MAX_LIVE_SPACES, 1:].tolist()
        page, end = first // PAGE_LINES, -(-(first + lines) // PAGE_LINES)
        own = self._has_page[page:end]
        if own.all():
            return False
        page += int(own.argmin())
        self._has_page[page] = True
        self.edges[page * PAGE_LINES * SLOTS_PER_LINE] |= 0  # a write, which changes nothing
        return True

    def is_live(self, space: int) -> bool:
        """Whether this is a private space that is not eliminated."""
        return space < 0 and bool(self.live[-space % MAX_LIVE_SPACES, 0] == space)

    def eliminate(self, space: int) -> None:
        """End a private space, in O(1). Its edges are never found again and are replaced first."""
        if self.is_live(space):
            self.live[-space % MAX_LIVE_SPACES] = 0

    def insert(self, space: int, hashes: Hashes, tokens: Int32s, with_whole: bool = True) -> None:
        """Count every n-gram that ends in `tokens` int32 [n], which follow the text of `hashes`.

        `hashes` uint64 [NUM_HASHES] is updated to the longer text. O(n). No n-gram reaches across
        UNKNOWN. A request's own text is inserted without the suffix WHOLE.
        """
        insert_text(self.arrays, space, hashes, tokens, with_whole)

    def insert_before(self, space: int, tokens: Int32s, start: int, end: int) -> None:
        """As `insert`, without WHOLE, of `tokens[start:end]`, newest first, as older than all that
        the space holds."""
        insert_before(self.arrays, space, tokens, start, end)

    def remove(self, space: int, tokens: Int32s, start: int, end: int) -> None:
        """Take back that `tokens[start:end]` were inserted without WHOLE.

        No n-gram is left that only they had; one that others have, too, may be lost if frequencies
        have faded since.
        """
        remove_text(self.arrays, space, tokens, start, end)


def spaces_of(edges: Int64s) -> Int32s:
    """The space of each edge: above 0 for answers, below 0 for private ones, 0 for empty slots."""
    return edges[:, KEY].astype(np.int32)  # the lower half


@kernel
def count_by_space(edges: Int64s, spaces: Int64s) -> Int64s:
    """The number of edges in each of these shared spaces, both int64 [n]. Reads every slot."""
    size = 16
    while size < 4 * len(spaces):
        size *= 2
    indices = np.full(size, -1, np.int64)  # into `spaces`: a hash table with open addressing
    for i, space in enumerate(spaces):
        at = space * 0x9E3779B1 & (size - 1)
        while indices[at] >= 0:
            at = (at + 1) & (size - 1)
        indices[at] = i
    counts = np.zeros(len(spaces), np.int64)
    for slot in range(len(edges)):
        space = np.int64(np.int32(edges[slot, KEY] & SPACE_MASK))
        if space > 0:
            at = space * 0x9E3779B1 & (size - 1)
            while indices[at] >= 0:
                if spaces[indices[at]] == space:
                    counts[indices[at]] += 1
                    break
                at = (at + 1) & (size - 1)
    return counts


@borrowing_kernel
def region_of(trie: TrieArrays, space: int) -> tuple[np.int64, np.int64]:
    """The first line of the part of the table that holds the space, and its number of lines."""
    row = -space % MAX_LIVE_SPACES if space < 0 else _SHARED
    return np.int64(trie.live[row, 1]), np.int64(trie.live[row, 2])


@borrowing_kernel
def locate(
    first: int, lines: int, space: int, hashes: Hashes, suffix: int
) -> tuple[np.int64, np.int64]:
    """The KEY of the suffix's edges and the first slot of their line.

    `first` and `lines` are the space's region, see `region_of`.
    """
    key = hash_in_space(hashes, suffix, space)
    line = first + np.int64(((key >> np.uint64(32)) * np.uint64(lines)) >> np.uint64(32))
    return np.int64(key << np.uint64(32)) | (np.int64(space) & SPACE_MASK), line * SLOTS_PER_LINE


@borrowing_kernel
def matches(edges: Int64s, key: int, slot: int) -> np.int64:
    """Which slots of the line at `slot` hold an edge of this key, as bits, the first slot lowest.

    These edges are in the order in which they were counted last, the latest first.
    """
    return (  # without a branch
        np.int64(edges[slot, KEY] == key)
        | np.int64(edges[slot + 1, KEY] == key) << 1
        | np.int64(edges[slot + 2, KEY] == key) << 2
        | np.int64(edges[slot + 3, KEY] == key) << 3
    )


@kernel
def _value(edges: Int64s, live: Int32s, slot: int, now: int) -> int:
    """The priority with which an edge is kept.

    From the lowest: empty slots, eliminated edges, then by frequency, then by time.
    """
    key = edges[slot, KEY]
    if key == 0:
        return _EMPTY
    space = np.int64(np.int32(key & SPACE_MASK))
    bonus = 0
    if space < 0:
        if live[-space % MAX_LIVE_SPACES, 0] != space:
            return _ELIMINATED
        bonus = LIVE_BONUS
    use = edges[slot, USE]
    age = (now - (use >> TIME_SHIFT)) & MAX_UINT16
    weight = ((use >> COUNT_SHIFT & MAX_UINT16) + bonus) >> min(age // HALF_LIFE_TICKS, 31)
    return (weight << 16) + MAX_UINT16 - age


@kernel
def count(
    edges: Int64s,
    live: Int32s,
    counters: Int64s,
    key: int,
    line: int,
    token: int,
    is_newest: bool = True,
) -> None:
    """Count that `token` followed the suffix of `key`.

    The edges of a suffix are in the order in which they were counted last. A token that is not the
    newest goes behind all others, or stays where it is.
    `line` is the first slot of the suffix's line. Takes the trie's arrays one by one: as a
    NamedTuple they cost 0.1 µs more for each token.
    """
    now = counters[CLOCK] // max(1, len(edges) // CLOCK_TICKS) & MAX_UINT16
    edge = -1
    for slot in range(line, line + SLOTS_PER_LINE):
        if edges[slot, KEY] == key and edges[slot, USE] & TOKEN_MASK == token:
            edge = slot
            break
    is_known = edge >= 0
    times = 0
    if is_known:
        use = edges[edge, USE]
        age = (now - (use >> TIME_SHIFT)) & MAX_UINT16
        times = (use >> COUNT_SHIFT & MAX_UINT16) >> min(age // HALF_LIFE_TICKS, 31)
    else:
        edge = line
        least = _value(edges, live, line, now)
        for slot in range(line + 1, line + SLOTS_PER_LINE):
            value = _value(edges, live, slot, now)
            if value < least or value == least >= 0:  # of one suffix, the last is the oldest
                edge, least = slot, value
        counters[CLOCK] += 1
        counters[PRUNED] += least >= 0
        counters[FILLED] += least == _EMPTY
    use = now << TIME_SHIFT | min(times + 1, MAX_UINT16) << COUNT_SHIFT | np.int64(token)
    if is_newest:
        for slot in range(edge - 1, line - 1, -1):
            if edges[slot, KEY] == key:
                edges[edge, KEY], edges[edge, USE] = key, edges[slot, USE]
                edge = slot
    elif not is_known:
        for slot in range(edge + 1, line + SLOTS_PER_LINE):
            if edges[slot, KEY] == key:
                edges[edge, KEY], edges[edge, USE] = key, edges[slot, USE]
                edge = slot
    edges[edge, KEY], edges[edge, USE] = key, use


@kernel
def insert_text(
    trie: TrieArrays, space: int, hashes: Hashes, tokens: Int32s, with_whole: bool
) -> None:
    trie = TrieArrays(*trie)
    next_hashes = np.empty_like(hashes)
    edges, live, counters = trie.edges, trie.live, trie.counters
    first, lines = region_of(trie, space)
    for token in tokens:
        if token == UNKNOWN:
            hashes[:] = 0
            continue
        if space != NO_SPACE:
            for suffix in range(NUM_SUFFIXES):
                if suffix == WHOLE and not with_whole:
                    continue
                key, slot = locate(first, lines, space, hashes, suffix)
                count(edges, live, counters, key, slot, token)
        advance(hashes, token, next_hashes)
        hashes[:] = next_hashes


@kernel
def _locate_all(
    trie: TrieArrays, space: int, tokens: Int32s, start: int, end: int
) -> tuple[Int64s, Int64s]:
    """What `locate` returns for each n-gram that ends in `tokens[start:end]`, int64
    [n, NUM_SUFFIXES]; the key is 0 where there is none. The memory fetches all of their lines."""
    keys = np.zeros((end - start, NUM_SUFFIXES), np.int64)
    slots = np.empty((end - start, NUM_SUFFIXES), np.int64)
    hashes = hashes_of(tokens[max(0, start - CONTEXT) : start])
    next_hashes = np.empty(NUM_HASHES, np.uint64)
    first, lines = region_of(trie, space)
    for i in range(end - start):
        token = tokens[start + i]
        if token == UNKNOWN:
            hashes[:] = 0
            continue
        for suffix in range(NUM_SUFFIXES):
            if suffix != WHOLE:
                keys[i, suffix], slots[i, suffix] = locate(first, lines, space, hashes, suffix)
                prefetch(trie.edges[slots[i, suffix]], 0)
        advance(hashes, token, next_hashes)
        hashes[:] = next_hashes
    return keys, slots


@kernel
def insert_before(trie: TrieArrays, space: int, tokens: Int32s, start: int, end: int) -> None:
    trie = TrieArrays(*trie)
    edges, live, counters = trie.edges, trie.live, trie.counters
    keys, slots = _locate_all(trie, space, tokens, start, end)
    for i in range(end - start - 1, -1, -1):
        for suffix in range(NUM_SUFFIXES):
            if keys[i, suffix]:
                key, slot = keys[i, suffix], slots[i, suffix]
                count(edges, live, counters, key, slot, tokens[start + i], False)


@kernel
def remove_text(trie: TrieArrays, space: int, tokens: Int32s, start: int, end: int) -> None:
    trie = TrieArrays(*trie)
    edges, counters = trie.edges, trie.counters
    keys, slots = _locate_all(trie, space, tokens, start, end)
    for i in range(end - start):
        for suffix in range(NUM_SUFFIXES):
            if keys[i, suffix] == 0:
                continue
            for slot in range(slots[i, suffix], slots[i, suffix] + SLOTS_PER_LINE):
                use = edges[slot, USE]
                if edges[slot, KEY] != keys[i, suffix] or use & TOKEN_MASK != tokens[start + i]:
                    continue
                if use >> COUNT_SHIFT & MAX_UINT16 > 1:
                    edges[slot, USE] = use - (1 << COUNT_SHIFT)
                else:
                    edges[slot, KEY] = edges[slot, USE] = 0
                    counters[FILLED] -= 1
                break


@kernel
def count_present(trie: TrieArrays, space: int, tokens: Int32s, places: Int64s) -> tuple[int, int]:
    """How many of the longest n-grams end at these places of a text, int64 [n], and how many of
    them the space holds. (Short suffixes have more followers than a line holds.)"""
    trie = TrieArrays(*trie)
    num_all = num_held = 0
    for place in places:
        keys, slots = _locate_all(trie, space, tokens, place, place + 1)
        key, slot = keys[0, WHOLE - 1], slots[0, WHOLE - 1]
        if key:
            num_all += 1
            for edge in range(slot, slot + SLOTS_PER_LINE):
                num_held += (
                    trie.edges[edge, KEY] == key
                    and trie.edges[edge, USE] & TOKEN_MASK == tokens[place]
                )
    return num_all, num_held
