"""The n-gram tries: one of all answers, and one of each live request's own text.

Source: Lookahead (Zhao et al., KDD 2024), sections 4.2 (trie, branch weighting, elimination,
pruning) and 4.3 (multi-stage retrieval). Two things are done otherwise, with the same meaning:

- A trie holds n-grams of at most `ngram_length` tokens, and a draft longer than that is grown by
  matching its own tail again at every node, so a long branch costs no memory.
- A prompt's branches live in a trie of their own, so that eliminating them is dropping that trie
  and cannot touch a frequency that another request counted on.

All tries share one arena of `max_nodes` slots, allocated once: the bound is global, and true.
Nothing points into a trie between two calls, so pruning can never leave a cursor on a dead node.
"""

from __future__ import annotations

import numpy as np
from numba import njit  # its cache looks at one file: touch the importers of a kernel you change
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Nodes = NDArray[np.void]
State = NDArray[np.int64]

NODE = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),  # NONE for a trie's root
        ("first", np.int32),  # first child; siblings stand roughly most frequent first
        ("next", np.int32),  # next sibling, or the next slot of the free or the dead list
        ("prev", np.int32),
        ("kind", np.int32),
        ("freq", np.float32),  # how often this token followed this path
        ("total", np.float32),  # how often anything followed it: the children's frequencies
    ]
)
NONE = -1
FREE, OUTPUT, PRIVATE = 0, 1, 2  # kinds

# Slots of `Arena.state`.
FREE_HEAD, DEAD_HEAD, FRESH, HAND, HELD, PRIVATE_HELD, EVICTED = range(7)

SWEEP = 4096  # slots that one allocation may look at before it gives up
PRIVATE_SHARE = 0.75  # of the slots: live prompts leave this much room, and no more, to the answers


class Arena:
    """The slots of every trie: one record array, one hash table of edges, one row of counters."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.nodes: Nodes = np.zeros(max_nodes, NODE)
        self.edges = np.full(1 << (2 * max_nodes - 1).bit_length(), NONE, np.int32)
        self.state = np.zeros(7, np.int64)
        self.state[FREE_HEAD] = self.state[DEAD_HEAD] = NONE

    @property
    def num_nodes(self) -> int:
        """Nodes that live tries hold, roots included; never more than `max_nodes`."""
        return int(self.state[HELD])

    @property
    def num_evicted(self) -> int:
        """Nodes pruned so far."""
        return int(self.state[EVICTED])


class Trie:
    """Counts of the n-grams of some streams of tokens.

    Parameters
    ----------
    arena : Arena
        Where the nodes live.
    kind : int
        OUTPUT nodes may be pruned when the arena is full; PRIVATE ones only go with their trie.
    ngram_length : int
        The longest n-gram held: a context of `ngram_length - 1` tokens and the one that followed.
    """

    def __init__(self, arena: Arena, kind: int, ngram_length: int) -> None:
        self.arena = arena
        self.ngram_length = ngram_length
        # NONE where the arena is full: a trie that stays empty
        self.root = int(_new_root(arena.nodes, arena.edges, arena.state, kind))
        self.num_nodes = int(self.root != NONE)

    def insert(self, tokens: Ints, num_context: int = 0) -> None:
        """Count every n-gram that ends in `tokens[num_context:]`; all can be found at once.

        `tokens` is int32 [n]; its first `num_context` tokens are the text that was inserted before
        (or belongs to somebody else): they are matched, not counted. Where the arena is full, what
        finds no room is left out. O(n * ngram_length).
        """
        arena = self.arena
        self.num_nodes += _insert(
            arena.nodes, arena.edges, arena.state, self.root, tokens, num_context, self.ngram_length
        )

    def frequency(self, ngram: tuple[int, ...]) -> float:
        """How often the n-gram's last token followed the others; 0.0 where it is not held."""
        node = self.root
        for token in ngram:
            node = find(self.arena.nodes, self.arena.edges, node, token)
        return float(self.arena.nodes[node]["freq"]) if node != NONE else 0.0

    def drop(self) -> None:
        """Give the nodes back, in O(1); the trie is empty from now on."""
        if self.root != NONE:
            _drop(self.arena.nodes, self.arena.state, self.root, self.num_nodes)
        self.root, self.num_nodes = NONE, 0


@njit(cache=True)
def _slot_of(edges: Ints, parent: int, token: int) -> np.int64:
    mixed = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ np.uint64(token)) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(edges) - 1))


@njit(cache=True)
def find(nodes: Nodes, edges: Ints, parent: int, token: int) -> int:
    """The child of `parent` that carries `token`, or NONE (also where `parent` is NONE)."""
    if parent == NONE:
        return NONE
    slot = _slot_of(edges, parent, token)
    while True:
        node = edges[slot]
        if node == NONE or (nodes[node].parent == parent and nodes[node].token == token):
            return node
        slot = (slot + 1) & (len(edges) - 1)


@njit(cache=True)
def match_suffixes(nodes: Nodes, edges: Ints, root: int, tail: Ints, matches: Ints) -> None:
    """Fill `matches` int32 [n]: entry k is the node of the last k tokens of `tail`, or NONE."""
    matches[:] = NONE
    matches[0] = root
    for start in range(max(0, len(tail) - len(matches) + 1), len(tail)):
        node = root
        for i in range(start, len(tail)):
            node = find(nodes, edges, node, tail[i])
        matches[len(tail) - start] = node


@njit(cache=True)
def advance(nodes: Nodes, edges: Ints, matches: Ints, token: int, advanced: Ints) -> None:
    """`matches` after one more token; both int32 [n], and not the same array."""
    advanced[0] = matches[0]
    for k in range(len(matches) - 1):
        advanced[k + 1] = find(nodes, edges, matches[k], token)


@njit(cache=True)
def _link(nodes: Nodes, edges: Ints, parent: int, token: int, node: int) -> None:
    slot = _slot_of(edges, parent, token)
    while edges[slot] != NONE:
        slot = (slot + 1) & (len(edges) - 1)
    edges[slot] = node
    nodes[node].token = token
    nodes[node].parent = parent
    head = nodes[parent].first
    if head != NONE and nodes[head].freq > 1:  # second place: a frequent head stays the head
        _place(nodes, parent, node, head)
    else:
        _place(nodes, parent, node, NONE)


@njit(cache=True)
def _place(nodes: Nodes, parent: int, node: int, after: int) -> None:
    """Put `node` into the list of siblings behind `after`; NONE means first."""
    following = nodes[parent].first if after == NONE else nodes[after].next
    nodes[node].prev = after
    nodes[node].next = following
    if following != NONE:
        nodes[following].prev = node
    if after == NONE:
        nodes[parent].first = node
    else:
        nodes[after].next = node


@njit(cache=True)
def _take(nodes: Nodes, parent: int, node: int) -> None:
    """Take `node` out of the list of siblings."""
    before, following = nodes[node].prev, nodes[node].next
    if before == NONE:
        nodes[parent].first = following
    else:
        nodes[before].next = following
    if following != NONE:
        nodes[following].prev = before


@njit(cache=True)
def _count(nodes: Nodes, parent: int, node: int) -> None:
    """One more occurrence: the node moves ahead of siblings that are no more frequent."""
    nodes[node].freq += 1
    nodes[parent].total += 1
    before = nodes[node].prev
    if before != NONE and nodes[node].freq >= nodes[before].freq:
        _take(nodes, parent, node)
        if nodes[node].freq >= nodes[nodes[parent].first].freq:
            _place(nodes, parent, node, NONE)
        else:
            _place(nodes, parent, node, nodes[before].prev)


@njit(cache=True)
def _free(nodes: Nodes, edges: Ints, state: State, node: int) -> None:
    """Remove the node's edge and put its slot on the free list. It must have no children."""
    if nodes[node].parent != NONE:
        mask = len(edges) - 1
        hole = _slot_of(edges, nodes[node].parent, nodes[node].token)
        while edges[hole] != node:
            hole = (hole + 1) & mask
        slot = hole
        while True:  # backward shift: no edge may be cut off from its home slot by the hole
            slot = (slot + 1) & mask
            moved = edges[slot]
            if moved == NONE:
                break
            home = _slot_of(edges, nodes[moved].parent, nodes[moved].token)
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                edges[hole] = moved
                hole = slot
        edges[hole] = NONE
    nodes[node].kind = FREE
    nodes[node].next = state[FREE_HEAD]
    state[FREE_HEAD] = node


@njit(cache=True)
def _bury_one(nodes: Nodes, edges: Ints, state: State) -> None:
    """Free one node of the dropped tries, a leaf: its parent's number must not be reused first."""
    while True:
        node = state[DEAD_HEAD]
        child = nodes[node].first
        if child == NONE:
            break
        nodes[node].first = nodes[child].next
        nodes[child].next = node
        state[DEAD_HEAD] = child
    state[DEAD_HEAD] = nodes[node].next
    _free(nodes, edges, state, node)


@njit(cache=True)
def _is_prunable(nodes: Nodes, node: int, cursors: Ints) -> bool:
    if nodes[node].freq >= 1 or nodes[node].first != NONE or nodes[node].parent == NONE:
        return False
    for cursor in cursors:  # noqa: SIM110  numba has no all() of a generator
        if cursor == node:
            return False
    return True


@njit(cache=True)
def _prune(nodes: Nodes, edges: Ints, state: State, cursors: Ints) -> None:
    """Sweep on, halving frequencies, until a leaf falls below 1; it goes, and what hung on it."""
    for _ in range(SWEEP):
        node = state[HAND]
        state[HAND] = (node + 1) % len(nodes)
        if nodes[node].kind != OUTPUT:
            continue
        nodes[node].freq *= 0.5
        nodes[node].total *= 0.5
        if not _is_prunable(nodes, node, cursors):
            continue
        while _is_prunable(nodes, node, cursors):
            parent = nodes[node].parent
            nodes[parent].total = max(0.0, nodes[parent].total - nodes[node].freq)
            _take(nodes, parent, node)
            _free(nodes, edges, state, node)
            state[HELD] -= 1
            state[EVICTED] += 1
            node = parent
        return


@njit(cache=True)
def _allocate(nodes: Nodes, edges: Ints, state: State, kind: int, cursors: Ints) -> int:
    """A blank slot, or NONE. Only answers that no cursor of the caller stands on are pruned."""
    if kind == PRIVATE and state[PRIVATE_HELD] >= PRIVATE_SHARE * len(nodes):
        return NONE
    if state[FREE_HEAD] == NONE and state[FRESH] == len(nodes):
        if state[DEAD_HEAD] != NONE:
            _bury_one(nodes, edges, state)
        else:
            _prune(nodes, edges, state, cursors)
    node = state[FREE_HEAD]
    if node != NONE:
        state[FREE_HEAD] = nodes[node].next
    elif state[FRESH] < len(nodes):
        node = state[FRESH]
        state[FRESH] += 1
    else:
        return NONE
    nodes[node].first = nodes[node].next = nodes[node].prev = nodes[node].parent = NONE
    nodes[node].freq = nodes[node].total = 0
    nodes[node].kind = kind
    state[HELD] += 1
    if kind == PRIVATE:
        state[PRIVATE_HELD] += 1
    return node


@njit(cache=True)
def _new_root(nodes: Nodes, edges: Ints, state: State, kind: int) -> int:
    return _allocate(nodes, edges, state, kind, np.empty(0, np.int32))


@njit(cache=True)
def _drop(nodes: Nodes, state: State, root: int, num_nodes: int) -> None:
    nodes[root].next = state[DEAD_HEAD]
    state[DEAD_HEAD] = root
    state[HELD] -= num_nodes
    if nodes[root].kind == PRIVATE:
        state[PRIVATE_HELD] -= num_nodes


@njit(cache=True)
def _insert(
    nodes: Nodes,
    edges: Ints,
    state: State,
    root: int,
    tokens: Ints,
    num_context: int,
    ngram_length: int,
) -> int:
    """See `Trie.insert`. Returns the number of nodes made."""
    if root == NONE:
        return 0
    made = 0
    kind = nodes[root].kind
    cursors = np.full(ngram_length, NONE, np.int32)  # entry k: the node of the last k tokens
    cursors[0] = root
    for i in range(max(0, num_context - ngram_length + 1), len(tokens)):
        for k in range(ngram_length - 1, -1, -1):  # longest first: entry k + 1 is done with
            parent = cursors[k]
            node = find(nodes, edges, parent, tokens[i])
            if parent != NONE and node == NONE:
                node = _allocate(nodes, edges, state, kind, cursors)
                if node != NONE:
                    _link(nodes, edges, parent, tokens[i], node)
                    made += 1
            if node != NONE and i >= num_context:
                _count(nodes, parent, node)
            if k + 1 < ngram_length:
                cursors[k + 1] = node
    return made
