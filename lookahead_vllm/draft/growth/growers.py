"""The trees of a step, grown by one thread or several.

The trees of a step do not depend on each other, and compiled code needs no interpreter to grow
them. A thread that sleeps takes as long to wake as ten trees take to grow. So `Growers` calls its
threads shortly before the tokens arrive, and they wait for the trees in compiled code. When these
have grown, one of the threads learns from the tokens, while the step is launched.
"""

import threading
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft import instructions
from lookahead_vllm.draft.growth.acceptance_rate import RateArrays, new_inputs
from lookahead_vllm.draft.growth.candidates import MAX_ALL_CANDIDATES, new_candidates
from lookahead_vllm.draft.growth.learning import NewTokens, extend, new_tokens
from lookahead_vllm.draft.growth.recycling import NUM_LENGTHS, new_replaced
from lookahead_vllm.draft.growth.trees import (
    GROWN,
    MIN_PROBABILITY,
    NUM_HANDS,
    ROW,
    TREE,
    InHand,
    Nodes,
    TextArrays,
    TreeLimits,
    begin_tree,
    bounds_of,
    copy_nodes,
    expand,
    new_in_hand,
    new_nodes,
    nodes_of,
    take_buds,
)
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.tree import ForestFields
from lookahead_vllm.draft.trie.table import TrieArrays

Bytes = NDArray[np.uint8]

MAX_THREADS = 3
"""The most threads beside the proposer's own."""
MIN_NODES_FOR_THREADS = 100
"""With fewer nodes in a step, threads gain less than it takes to call them."""

START, SIZE = 4, 5  # of `SharedTrees.trees`, after the columns of the trees to grow


class SharedTrees(NamedTuple):
    """The trees of a step while threads grow them, as arrays that are reused in every step."""

    gate: Int64s
    """int64 [GATE_SIZE]: the TICKET of the next tree that a thread may take; with it the number of
    the step, so that a thread that is late takes nothing from another one. COUNT of all trees, and
    how many are DONE. UNLEARNED is the number of the step, plus 1, until a thread learns from the
    tokens, then TAKEN, and 0 when they are learned."""
    trees: Int64s
    """int64 [capacity, 6]: with where the nodes of a tree START in `nodes`, and its SIZE."""
    nodes: Nodes


# Elements of `SharedTrees.gate`, each in a line of 64 bytes of its own.
TICKET, DONE, COUNT, UNLEARNED = 0, 8, 16, 24
GATE_SIZE = 32
TAKEN = -1

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
def grow_all(
    trees: Int64s,
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    learned: RateArrays,
    limits: TreeLimits,
    shared: SharedTrees,
) -> ForestFields:
    """Grow the `trees` int64 [t, 4].

    `lines` are those of `recycling.py`; there may be none. Threads in `help_grow` take some of the
    trees, and then the step's tokens. IndexError if `shared` has no room for the trees.
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
    instructions.store_atomic(gate, UNLEARNED, step + 1)
    firsts = np.zeros(count + 1, np.int64)
    for i in range(count):
        firsts[i + 1] = firsts[i] + shared_trees[i, SIZE]
    grown = new_nodes(firsts[-1])
    for i in range(count):
        copy_nodes(nodes, shared_trees[i, START], shared_trees[i, SIZE], grown, firsts[i])
    fields = grown.fields
    return fields[0], fields[1], grown.probs, fields[2], grown.sources, firsts


@partial(kernel, nogil=True)
def help_grow(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    learned: RateArrays,
    limits: TreeLimits,
    shared: SharedTrees,
    new: NewTokens,
    learns: bool,
    step: int,
) -> None:
    """Wait for the trees of a step, and grow some of them, until another step begins.

    If it `learns`, also from the `new` tokens, unless another thread does.
    """
    gate = shared[0]
    for _ in range(_MAX_PAUSES):
        ticket = instructions.load_atomic(gate, TICKET)
        if ticket >> STEP_SHIFT != step:
            break
        if ticket & _TREE_MASK < gate[COUNT]:
            _grow_some(trie, lines, texts, learned, limits, shared, step)
        if learns and instructions.load_atomic(gate, UNLEARNED) == step + 1:
            learn_tokens(trie, lines, learned, gate, new, step + 1)
        instructions.pause()


@kernel
def learn_tokens(
    trie: TrieArrays, lines: Int32s, learned: RateArrays, gate: Int64s, new: NewTokens, turn: int
) -> bool:
    """Learn from the `new` tokens, unless another thread does; returns whether it did not. `turn`
    is the value of UNLEARNED."""
    is_mine = instructions.replace_atomic(gate, UNLEARNED, turn, TAKEN)
    if is_mine:
        extend(trie, lines, new, learned)
        instructions.store_atomic(gate, UNLEARNED, 0)
    return is_mine


@kernel
def copy_between_turns(gate: Int64s, source: Bytes, target: Bytes) -> None:
    """Copy bytes while no thread learns. No step begins meanwhile: this holds the interpreter's
    lock."""
    turn = instructions.load_atomic(gate, UNLEARNED)
    while turn == TAKEN or (turn and not instructions.replace_atomic(gate, UNLEARNED, turn, TAKEN)):
        instructions.pause()
        turn = instructions.load_atomic(gate, UNLEARNED)
    target[:] = source
    instructions.store_atomic(gate, UNLEARNED, turn)


@kernel
def _unlearned(gate: Int64s) -> int:
    return instructions.load_atomic(gate, UNLEARNED)


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
    limits, shared = TreeLimits(*limits), SharedTrees(shared[0], shared[1], Nodes(*shared[2]))
    # Each of MAX_THREADS others finds as many trees.
    num_hands = min(NUM_HANDS, max(1, shared.gate[COUNT] // (MAX_THREADS + 1)))
    in_hand = new_in_hand(num_hands, limits.max_nodes)
    candidates, inputs = new_candidates(), new_inputs()
    shares = np.empty(MAX_ALL_CANDIDATES, np.float32)
    min_prob = np.float32(max(limits.min_prob, MIN_PROBABILITY))
    num_busy = 1
    while num_busy:
        num_busy = 0
        for hand in range(num_hands):
            num_busy += _move_on(trie, lines, texts, limits, shared, step, in_hand, hand)
        for hand in range(num_hands):
            tree = in_hand.state[hand, TREE]
            if tree >= 0:
                bounds = bounds_of(shared.trees[tree], limits)
                row = shared.trees[tree, ROW]
                expand(
                    trie,
                    lines,
                    texts,
                    learned,
                    row,
                    bounds,
                    min_prob,
                    in_hand,
                    hand,
                    candidates,
                    inputs,
                    shares,
                )


@borrowing_kernel
def _move_on(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    limits: TreeLimits,
    shared: SharedTrees,
    step: int,
    in_hand: InHand,
    hand: int,
) -> bool:
    """Look up the next node that gets children, in this tree or another; False if none is left."""
    gate, trees, shared_nodes = shared
    state = in_hand.state[hand]
    while True:
        tree = state[TREE]
        if tree >= 0:
            bounds = bounds_of(trees[tree], limits)
            if take_buds(trie, lines, texts, trees[tree, ROW], bounds, in_hand, hand):
                return True
            trees[tree, SIZE] = state[GROWN]
            copy_nodes(nodes_of(in_hand, hand), 0, state[GROWN], shared_nodes, trees[tree, START])
            instructions.add_atomic(gate, DONE, 1)
        state[TREE] = tree = _take(gate, step)
        if tree < 0:
            return False
        bounds = bounds_of(trees[tree], limits)
        if begin_tree(trie, lines, texts, trees[tree, ROW], bounds, in_hand, hand):
            return True


class Growers:
    """The threads of a proposer, beside its own, and what they share.

    There are none before `start`.

    Attributes
    ----------
    new : NewTokens
        Those of the last step that has grown trees; `replaced` may be the next one's already.
    """

    def __init__(self, chain_length: int) -> None:
        self._trees = new_shared_trees(1, 1)
        self.new = new_tokens(1, 1, chain_length)
        self._most_nodes = 0
        self._num_threads = 0
        self._calls: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._is_helped = False
        """Whether a thread may still learn from the tokens of the last `learn`."""

    @property
    def shared(self) -> tuple[Any, Any]:
        """The fields of SharedTrees and of NewTokens, as plain tuples, which cost less to pass."""
        gate, trees, nodes = self._trees
        return (gate, trees, nodes[:]), self.new[:]

    def start(self, num_threads: int) -> None:
        """Have so many threads more, for as long as the process lives."""
        for _ in range(num_threads):
            threading.Thread(target=self._work, name="lookahead-grower", daemon=True).start()
        self._num_threads += num_threads

    def make_room(self, num_trees: int, num_nodes: int) -> None:
        """The next step has so many trees, with at most so many nodes together."""
        self.dismiss()  # it may begin without a call
        self._most_nodes = num_nodes
        gate, trees, nodes = self._trees
        if num_trees > len(trees) or num_nodes > len(nodes.probs):
            size = max(num_trees, 2 * len(trees)), max(num_nodes, 2 * len(nodes.probs))
            self._trees = new_shared_trees(*size)._replace(gate=gate)

    def make_room_for_tokens(self, num_texts: int, num_tokens: int) -> None:
        """The step has so many texts with new tokens; those of the last one are learned."""
        texts, tokens = len(self.new.rows), len(self.new.tokens)
        if num_texts > texts or num_tokens > tokens:
            self.dismiss()
            size = max(num_texts, 2 * texts), max(num_tokens, 2 * tokens)
            larger = new_tokens(*size, self.new.chains.shape[1])
            self.new = larger._replace(sizes=self.new.sizes, replaced=self.new.replaced)

    def make_room_for_choices(self, num_rows: int) -> None:
        """The step has the model's choices at so many rows; the last one's tokens are learned."""
        if NUM_LENGTHS * num_rows > len(self.new.replaced):
            self.dismiss()
            self.new = self.new._replace(replaced=new_replaced(2 * num_rows))

    def call(self, *tables: Any, learns: bool) -> None:
        """The trees of the step will soon be known; `tables` are the first arguments of
        `help_grow`. With `learns`, one of the threads learns from the tokens."""
        if self._num_threads and self._most_nodes >= MIN_NODES_FOR_THREADS:
            self.dismiss()
            step = int(self._trees.gate[TICKET]) >> STEP_SHIFT
            for _ in range(self._num_threads):
                self._calls.put((*tables, *self.shared, learns, step))

    def dismiss(self) -> None:
        """Let the threads sleep, once they have learned. Until then they stay in compiled code,
        because on their way back they would take the interpreter's lock from a step that the device
        waits for."""
        if self._num_threads:
            gate = self._trees.gate
            gate[TICKET] = ((int(gate[TICKET]) >> STEP_SHIFT) + 1) << STEP_SHIFT | CLOSED

    def learn(self, trie: tuple[Any, ...], lines: Int32s, learned: tuple[Any, ...]) -> None:
        """Learn from the tokens, unless a thread does, or has; the arguments are `help_grow`'s."""
        gate = self._trees.gate
        turn = int(gate[UNLEARNED])
        self._is_helped = turn <= 0 or not learn_tokens(
            trie, lines, learned, gate, self.new[:], turn
        )

    def wait(self) -> None:
        """Wait until no thread learns. `learn` has been called."""
        while self._is_helped and _unlearned(self._trees.gate) == TAKEN:
            instructions.pause_unlocked()
        self._is_helped = False

    def copy(self, source: Bytes, target: Bytes) -> None:
        """Copy bytes of what threads learn, while none does."""
        copy_between_turns(self._trees.gate, source, target)

    def _work(self) -> None:
        while True:
            help_grow(*self._calls.get())
