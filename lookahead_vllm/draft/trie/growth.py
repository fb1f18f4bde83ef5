"""Draft trees, grown best first, by one thread or several.

Source: hierarchical multi-branch drafts, Lookahead (KDD 2024), section 4.1: branches that share a
prefix share its nodes, and if there are too many nodes, the best ones are kept.

The trees of a step do not depend on each other, and compiled code needs no interpreter to grow
them. A thread that sleeps takes as long to wake as ten trees take to grow. So `Growers` calls its
threads shortly before the tokens arrive, and they wait for the trees in compiled code.
"""

import threading
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft import instructions
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.sources import ANSWERS, DRAFTER, OWN, RECYCLED, REFERENCE, WINDOW
from lookahead_vllm.draft.trie.acceptance_rate import (
    MAX_ESTIMATE,
    Float32s,
    Inputs,
    RateArrays,
    estimate,
    new_inputs,
    weight_set,
)
from lookahead_vllm.draft.trie.candidates import (
    CHOICES,
    CHOSEN,
    MAX_ALL_CANDIDATES,
    MAX_CANDIDATES,
    TOKEN,
    Candidates,
    find_candidates,
    look_up,
    new_candidates,
)
from lookahead_vllm.draft.trie.chains import find_drafted, follow_chain, is_drafted
from lookahead_vllm.draft.trie.recycling import find_choices, is_from_cell
from lookahead_vllm.draft.trie.suffix import (
    NUM_CONTIGUOUS,
    NUM_HASHES,
    NUM_SUFFIXES,
    WHOLE,
    Hashes,
    advance,
)
from lookahead_vllm.draft.trie.table import TrieArrays

MIN_PROBABILITY = 0.001  # nodes less likely than this are never drafted

MIN_CANDIDATES = 6
"""The candidates found for the least likely node; MAX_CANDIDATES for a node of probability 1."""
MIN_SPARSE_PROBABILITY = 0.2
"""Sparse suffixes are looked up for nodes at least this likely."""

MIN_NODES_FOR_THREADS = 100
"""With fewer nodes in a step, threads gain less than it takes to call them."""


class TextArrays(NamedTuple):
    """The arrays of the live texts, a row for each."""

    hashes: Hashes
    """uint64 [capacity, NUM_HASHES]"""
    spaces: Int32s
    """int32 [capacity, NUM_SPACES]: of the trie and of the model's choices."""
    chains: Int32s
    """int32 [capacity, K, NUM_ALTERNATIVES, 2]: what a drafter proposes after each text."""


# Columns of the trees to grow, int64 [t, 4]: the row of the text, the most nodes, the most levels,
# and whether the tree may branch.
ROW, NODES, DEPTH, MAY_BRANCH = range(4)
START, SIZE = 4, 5  # of `SharedTrees.trees`, after these


class TreeLimits(NamedTuple):
    """How large any tree may be."""

    max_nodes: int
    max_depth: int
    min_prob: float
    """Nodes less likely than this are left out."""


class Nodes(NamedTuple):
    """The nodes of a tree, or of all trees of a step."""

    fields: Int32s
    """int32 [3, n]: tokens, parents, depths."""
    probs: Float32s
    """float32 [n]"""
    sources: NDArray[np.uint8]
    """uint8 [n]"""


class SharedTrees(NamedTuple):
    """The trees of a step while threads grow them, as arrays that are reused in every step."""

    gate: Int64s
    """int64 [GATE_SIZE]: the TICKET of the next tree that a thread may take; with it the number of
    the step, so that a thread that is late takes nothing from another one. COUNT of all trees, and
    how many are DONE."""
    trees: Int64s
    """int64 [capacity, 6]: with where the nodes of a tree START in `nodes`, and its SIZE."""
    nodes: Nodes


# Elements of `SharedTrees.gate`, each in a line of 64 bytes of its own.
TICKET, DONE, COUNT = 0, 8, 16
GATE_SIZE = 24

STEP_SHIFT = 32
_TREE_MASK = (1 << STEP_SHIFT) - 1
CLOSED = _TREE_MASK
"""In place of a tree in a TICKET: the trees of the step are not known yet."""
_MAX_PAUSES = 1 << 20
"""After so many, some 50 ms, a thread stops waiting for trees."""


def new_shared_trees(num_trees: int, num_nodes: int) -> SharedTrees:
    """Arrays for so many trees, which together have at most so many nodes."""
    gate, trees = np.zeros(GATE_SIZE, np.int64), np.empty((num_trees, 6), np.int64)
    return SharedTrees(gate, trees, new_nodes.py_func(num_nodes))


@kernel
def new_nodes(size: int) -> Nodes:
    """Arrays for so many nodes."""
    return Nodes(
        np.empty((3, size), np.int32), np.empty(size, np.float32), np.empty(size, np.uint8)
    )


@borrowing_kernel
def bounds_of(tree: Int64s, limits: TreeLimits) -> tuple[int, int, int]:
    """The max_nodes and max_depth of one tree, and whether it may branch, 0 or 1."""
    max_nodes = max(min(tree[NODES], limits.max_nodes), 0)
    max_depth = max(min(tree[DEPTH], limits.max_depth), 0)
    return max_nodes, max_depth, tree[MAY_BRANCH]


@kernel
def grow_all(
    trees: Int64s,
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    learned: RateArrays,
    limits: TreeLimits,
    shared: SharedTrees,
) -> tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]:
    """Grow the `trees` int64 [t, 4]; returns the fields of a DraftForest.

    `lines` are those of `recycling.py`; there may be none. Threads in `help_grow` take some of the
    trees. IndexError if `shared` has no room for them.
    """
    gate, shared_trees, nodes = shared[0], shared[1], Nodes(*shared[2])
    count, size = len(trees), 0
    if count > len(shared_trees):
        raise IndexError("there is no room for the trees")
    for i in range(count):
        shared_trees[i, :START], shared_trees[i, START] = trees[i], size
        size += bounds_of(trees[i], TreeLimits(*limits))[0]
    if size > len(nodes.probs):
        raise IndexError("there is no room for the nodes")
    gate[DONE], gate[COUNT] = 0, count
    ticket = gate[TICKET]
    step = (ticket >> STEP_SHIFT) + np.int64(ticket & _TREE_MASK != CLOSED)
    instructions.store_atomic(gate, TICKET, step << STEP_SHIFT)
    _grow_some(trie, lines, texts, learned, limits, shared, step)
    while instructions.load_atomic(gate, DONE) < count:
        instructions.pause()
    firsts = np.zeros(count + 1, np.int64)
    for i in range(count):
        firsts[i + 1] = firsts[i] + shared_trees[i, SIZE]
    grown = new_nodes(firsts[-1])
    for i in range(count):
        _copy(nodes, shared_trees[i, START], shared_trees[i, SIZE], grown, firsts[i])
    fields = grown.fields
    return fields[0], fields[1], grown.probs, fields[2], grown.sources, firsts


@borrowing_kernel
def _copy(nodes: Nodes, first: int, size: int, result: Nodes, at: int) -> None:
    """Copy `size` nodes, from the `first` one on, to `result` from `at` on."""
    for i in range(size):
        for field in range(3):
            result.fields[field, at + i] = nodes.fields[field, first + i]
        result.probs[at + i] = nodes.probs[first + i]
        result.sources[at + i] = nodes.sources[first + i]


@partial(kernel, nogil=True)
def help_grow(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    learned: RateArrays,
    limits: TreeLimits,
    shared: SharedTrees,
    step: int,
) -> None:
    """Wait for the trees of a step, and grow some of them, until another step begins."""
    gate = shared[0]
    for _ in range(_MAX_PAUSES):
        ticket = instructions.load_atomic(gate, TICKET)
        if ticket >> STEP_SHIFT != step:
            break
        if ticket & _TREE_MASK < gate[COUNT]:
            _grow_some(trie, lines, texts, learned, limits, shared, step)
        instructions.pause()


@kernel
def _take(gate: Int64s, step: int) -> int:
    """A tree of the step that no thread has taken yet; -1 if there is none."""
    while True:
        ticket = instructions.load_atomic(gate, TICKET)
        tree = ticket & _TREE_MASK
        if ticket >> STEP_SHIFT != step or tree >= gate[COUNT]:
            return -1
        if instructions.replace_atomic(gate, TICKET, ticket, ticket + 1):
            return tree


@kernel
def _grow_some(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    learned: RateArrays,
    limits: TreeLimits,
    shared: SharedTrees,
    step: int,
) -> None:
    """Grow trees of the step until all are taken."""
    trie, texts, learned = TrieArrays(*trie), TextArrays(*texts), RateArrays(*learned)
    limits = TreeLimits(*limits)
    gate, trees, shared_nodes = shared
    # Reused for every tree, and passed one by one: nested in a NamedTuple they cost 2 µs a step.
    hashes = np.empty((limits.max_nodes + 1, NUM_HASHES), np.uint64)
    places = np.empty(limits.max_nodes + 1, np.int32)
    candidates, inputs = new_candidates(), new_inputs()
    shares = np.empty(MAX_ALL_CANDIDATES, np.float32)
    # Of its own, because threads that write to the same line of memory wait for each other.
    nodes = new_nodes(limits.max_nodes)
    min_prob = np.float32(max(limits.min_prob, MIN_PROBABILITY))
    i = _take(gate, step)
    while i >= 0:
        row = trees[i, ROW]
        hashes[0] = texts.hashes[row]
        size = grow(
            trie,
            lines,
            texts.spaces[row],
            texts.chains[row],
            learned,
            bounds_of(trees[i], limits),
            min_prob,
            hashes,
            places,
            candidates,
            inputs,
            shares,
            nodes,
        )
        trees[i, SIZE] = size
        _copy(nodes, 0, size, Nodes(*shared_nodes), trees[i, START])
        instructions.add_atomic(gate, DONE, 1)
        i = _take(gate, step)


@borrowing_kernel
def _source_of(evidence: Int32s, i: int) -> int:
    if evidence[REFERENCE, i]:
        return REFERENCE
    if evidence[OWN, i]:
        return OWN
    if evidence[ANSWERS, i] or evidence[CHOSEN, i] == 0:
        return ANSWERS
    if is_drafted(evidence[CHOSEN, i]):
        return DRAFTER
    return WINDOW if is_from_cell(evidence[CHOSEN, i]) else RECYCLED


@borrowing_kernel
def grow(
    trie: TrieArrays,
    lines: Int32s,
    spaces: Int32s,
    chain: Int32s,
    learned: RateArrays,
    limits: tuple[int, int, int],
    min_prob: np.float32,
    hashes: Hashes,
    places: Int32s,
    candidates: Candidates,
    inputs: Inputs,
    shares: Float32s,
    nodes: Nodes,
) -> int:
    """Grow one tree: take the likeliest node, add its candidates, repeat; returns its size.

    `limits` are those of `bounds_of`. Row 0 of `hashes` uint64
    [max_nodes + 1, NUM_HASHES] is the root's, row i + 1 becomes that of node i; the same holds for
    `places` int32 [max_nodes + 1], on the drafter's `chain`. Fills `nodes`: parents before
    children, probabilities falling or equal. A node's probability is its parent's times the learned
    acceptance rate of its evidence, scaled down where siblings would add up to more than their
    parent.
    """
    max_nodes, max_depth, may_branch = limits
    evidence, longest = candidates.evidence, candidates.longest
    fields, probs, sources = nodes.fields, nodes.probs, nodes.sources
    # A bud is a node that may be taken next. The buds come after the nodes, likeliest first.
    size, num_buds = 0, 0
    places[0] = 0
    here, depth, prob = -1, 0, np.float32(1.0)
    while size < max_nodes:
        # No child of the likeliest node may be likelier than the last of all places.
        is_full = size + num_buds >= max_nodes
        if depth < max_depth and not (is_full and prob * MAX_ESTIMATE <= probs[max_nodes - 1]):
            # Only the likeliest children of an unlikely node can matter.
            max_found = MIN_CANDIDATES + np.int64((MAX_CANDIDATES - MIN_CANDIDATES) * prob)
            num_suffixes = NUM_SUFFIXES if prob >= MIN_SPARSE_PROBABILITY else NUM_CONTIGUOUS
            look_up(trie, spaces, hashes[here + 1], candidates.lookups, num_suffixes)
            num_found = find_candidates(trie.edges, spaces, candidates, max_found, num_suffixes)
            longest[CHOICES], num_found = find_choices(
                lines, spaces[CHOICES], hashes[here + 1], evidence, num_found, max_found
            )
            longest[CHOICES], num_found = find_drafted(
                chain, places[here + 1], evidence, longest[CHOICES], num_found
            )
            weights = weight_set(longest, spaces)
            estimate(evidence, num_found, learned, weights, inputs, shares)
            total = np.float32(0)
            best = 0
            for i in range(num_found):
                total += shares[i]
                if shares[i] > shares[best]:
                    best = i
            scale = best_scale = np.float32(1)
            if total > np.float32(1):
                if longest[ANSWERS] == WHOLE + 1:
                    # An answer that repeats another one is certain enough for a long branch.
                    scale = (np.float32(1) - shares[best]) / (total - shares[best])
                else:
                    scale = best_scale = np.float32(1) / total
            for i in range(num_found):
                likely = prob * shares[i] * (best_scale if i == best else scale)
                if likely < min_prob or (i != best and not may_branch):
                    continue
                if size + num_buds < max_nodes:
                    num_buds += 1
                elif likely <= probs[max_nodes - 1]:
                    continue
                at = size + num_buds - 1
                while at > size and probs[at - 1] < likely:
                    probs[at], sources[at] = probs[at - 1], sources[at - 1]
                    fields[0, at], fields[1, at] = fields[0, at - 1], fields[1, at - 1]
                    at -= 1
                probs[at], fields[0, at], fields[1, at] = likely, evidence[TOKEN, i], here
                sources[at] = _source_of(evidence, i)
        if num_buds == 0:
            break
        here, parent, prob = size, fields[1, size], probs[size]
        fields[2, here] = depth = 1 if parent < 0 else fields[2, parent] + 1
        advance(hashes[parent + 1], fields[0, here], hashes[here + 1])
        places[here + 1] = follow_chain(chain, places[parent + 1], fields[0, here])
        size, num_buds = size + 1, num_buds - 1
    return size


class Growers:
    """The threads of a proposer, beside its own, and the trees that they share.

    There are none before `start`.
    """

    def __init__(self) -> None:
        self._trees = new_shared_trees(1, 1)
        self._most_nodes = 0
        self._num_threads = 0
        self._calls: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    @property
    def shared(self) -> tuple[Any, ...]:
        """The fields of SharedTrees, as plain tuples, which cost less to pass."""
        gate, trees, nodes = self._trees
        return gate, trees, nodes[:]

    def start(self, num_threads: int) -> None:
        """Have so many threads more, for as long as the process lives."""
        for _ in range(num_threads):
            threading.Thread(target=self._work, name="lookahead-grower", daemon=True).start()
        self._num_threads += num_threads

    def make_room(self, num_trees: int, num_nodes: int) -> None:
        """The next step has so many trees, with at most so many nodes together."""
        self._most_nodes = num_nodes
        trees, nodes = len(self._trees.trees), len(self._trees.nodes.probs)
        if num_trees > trees or num_nodes > nodes:
            self.dismiss()
            self._trees = new_shared_trees(max(num_trees, 2 * trees), max(num_nodes, 2 * nodes))

    def call(self, *arguments: Any) -> None:
        """The trees of the step will soon be known; `arguments` are the first of `help_grow`."""
        if self._num_threads and self._most_nodes >= MIN_NODES_FOR_THREADS:
            self.dismiss()
            step = int(self._trees.gate[TICKET]) >> STEP_SHIFT
            for _ in range(self._num_threads):
                self._calls.put((*arguments, self.shared, step))

    def dismiss(self) -> None:
        """Let the threads sleep. Until then they stay in compiled code, because on their way back
        they would take the interpreter's lock from a step that the device waits for."""
        if self._num_threads:
            gate = self._trees.gate
            gate[TICKET] = ((int(gate[TICKET]) >> STEP_SHIFT) + 1) << STEP_SHIFT | CLOSED

    def _work(self) -> None:
        while True:
            help_grow(*self._calls.get())
