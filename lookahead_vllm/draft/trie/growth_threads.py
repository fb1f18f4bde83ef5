"""Growth of a step's trees on several threads: each thread takes the next tree.

Trees do not depend on each other, and growing one changes nothing that another one reads. So the
forest is the same for any number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.progress import no_chains
from lookahead_vllm.draft.threads import (
    HelperThreads,
    finish_task,
    offer_tasks,
    take_task,
    wait_for_offer,
    wait_for_tasks,
)
from lookahead_vllm.draft.trie.acceptance_rate import Float32s, RateArrays
from lookahead_vllm.draft.trie.candidates import (
    NUM_SPACES,
    Candidates,
    new_candidates,
)
from lookahead_vllm.draft.trie.growth import (
    MIN_PROBABILITY,
    ROW,
    Nodes,
    TextArrays,
    TreeLimits,
    bounds_of,
    grow,
    new_memory,
)
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, Hashes
from lookahead_vllm.draft.trie.table import TrieArrays

MIN_SHARED_TREES = 16
"""The calling thread grows fewer trees by itself: to wake another takes as long as it saves."""

_INITIAL_CAPACITY = 64


class _Trees(NamedTuple):
    """The trees of a step, a row for each: what they grow from, and their nodes."""

    hashes: Hashes
    """uint64 [capacity, NUM_HASHES]: of the texts."""
    spaces: Int32s
    """int32 [capacity, NUM_SPACES]: of the texts."""
    chains: Int32s
    """int32 [capacity, K, NUM_ALTERNATIVES, 2]: of the texts."""
    limits: Int64s
    """int64 [capacity, 3]: those of `bounds_of`."""
    min_prob: Float32s
    """float32 [1]: of all trees."""
    fields: Int32s
    """int32 [capacity, 3, max_nodes]: tokens, parents, depths."""
    probs: Float32s
    """float32 [capacity, max_nodes]"""
    sources: NDArray[np.uint8]
    """uint8 [capacity, max_nodes]"""
    sizes: Int64s
    """int64 [capacity]: the number of nodes of each tree."""


class GrowthThreads:
    """Threads that grow the trees of a step together with the calling thread.

    Parameters
    ----------
    num_threads : int
        The calling thread included.
    max_nodes : int
        The most nodes of a tree.
    chain_length : int
        K, the tokens that a trained drafter proposes.
    trie, lines, learned
        As for `growth.grow_all`, always these arrays.
    """

    def __init__(
        self,
        num_threads: int,
        max_nodes: int,
        chain_length: int,
        trie: tuple[Any, ...],
        lines: Int32s,
        learned: tuple[Any, ...],
    ) -> None:
        self._num_threads = num_threads
        self._max_nodes, self._chain_length = max_nodes, chain_length
        self._read = (trie, lines, learned)
        self._start(_INITIAL_CAPACITY)

    def grow_all(
        self, texts: tuple[Any, ...], trees: Int64s, limits: tuple[Any, ...]
    ) -> tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]:
        """Grow at least one tree; see `growth.grow_all`."""
        if len(trees) > len(self._trees.sizes):
            self._helpers.stop()
            self._start(2 * len(trees))
        forest: tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]
        forest = _grow_together(
            *self._read,
            self._trees[:],  # a plain tuple, see TrieArrays
            self._helpers.shared,
            self._helpers.count,
            texts,
            trees,
            limits,
        )
        return forest

    def _start(self, capacity: int) -> None:
        n = self._max_nodes
        self._trees = _Trees(
            np.zeros((capacity, NUM_HASHES), np.uint64),
            np.zeros((capacity, NUM_SPACES), np.int32),
            no_chains(self._chain_length, capacity),
            np.zeros((capacity, 3), np.int64),
            np.zeros(1, np.float32),
            np.zeros((capacity, 3, n), np.int32),
            np.zeros((capacity, n), np.float32),
            np.zeros((capacity, n), np.uint8),
            np.zeros(capacity, np.int64),
        )
        self._helpers = HelperThreads(self._num_threads - 1, _help, *self._read, self._trees[:])


@kernel(nogil=True)
def _help(
    trie: TrieArrays, lines: Int32s, learned: RateArrays, trees: _Trees, shared: Int64s
) -> None:
    """What a helper thread runs until it ends."""
    trie, learned, trees = TrieArrays(*trie), RateArrays(*learned), _Trees(*trees)
    # Nothing is allocated later: a thread that has taken a tree must not fail.
    hashes = np.empty((trees.probs.shape[1] + 1, NUM_HASHES), np.uint64)
    places, shares = new_memory(trees.probs.shape[1])
    candidates = new_candidates()
    while wait_for_offer(shared):
        _grow_some(trie, lines, learned, trees, shared, hashes, places, candidates, shares)


@kernel
def _grow_some(
    trie: TrieArrays,
    lines: Int32s,
    learned: RateArrays,
    trees: _Trees,
    shared: Int64s,
    hashes: Hashes,
    places: Int32s,
    candidates: Candidates,
    shares: Float32s,
) -> None:
    """Grow trees until all are taken. The last four arguments are the thread's own memory."""
    i = take_task(shared)
    while i >= 0:
        hashes[0] = trees.hashes[i]
        trees.sizes[i] = grow(
            trie,
            lines,
            trees.spaces[i],
            trees.chains[i],
            learned,
            (trees.limits[i, 0], trees.limits[i, 1], trees.limits[i, 2]),
            trees.min_prob[0],
            hashes,
            places,
            candidates,
            shares,
            Nodes(trees.fields[i], trees.probs[i], trees.sources[i]),
        )
        finish_task(shared)
        i = take_task(shared)


@kernel
def _grow_together(
    trie: TrieArrays,
    lines: Int32s,
    learned: RateArrays,
    trees: _Trees,
    shared: Int64s,
    num_helpers: int,
    texts: TextArrays,
    wanted: Int64s,
    limits: TreeLimits,
) -> tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]:
    """Grow all trees together with the helpers; returns the fields of a DraftForest."""
    trie, learned, trees = TrieArrays(*trie), RateArrays(*learned), _Trees(*trees)
    texts, limits = TextArrays(*texts), TreeLimits(*limits)
    num_trees = len(wanted)
    for i in range(num_trees):
        trees.hashes[i] = texts.hashes[wanted[i, ROW]]
        trees.spaces[i] = texts.spaces[wanted[i, ROW]]
        trees.chains[i] = texts.chains[wanted[i, ROW]]
        max_nodes, max_depth, may_branch = bounds_of(wanted[i], limits)
        trees.limits[i, 0] = max_nodes
        trees.limits[i, 1] = max_depth
        trees.limits[i, 2] = may_branch
    trees.min_prob[0] = max(limits.min_prob, MIN_PROBABILITY)
    hashes = np.empty((trees.probs.shape[1] + 1, NUM_HASHES), np.uint64)
    places, shares = new_memory(trees.probs.shape[1])
    candidates = new_candidates()
    offer_tasks(shared, num_trees, min(num_helpers, num_trees - 1))
    _grow_some(trie, lines, learned, trees, shared, hashes, places, candidates, shares)
    wait_for_tasks(shared)
    firsts = np.zeros(num_trees + 1, np.int64)
    for i in range(num_trees):
        firsts[i + 1] = firsts[i] + trees.sizes[i]
    size = firsts[num_trees]
    fields, probs = np.empty((3, size), np.int32), np.empty(size, np.float32)
    sources = np.empty(size, np.uint8)
    for i in range(num_trees):
        for place in range(trees.sizes[i]):
            node = firsts[i] + place
            for field in range(3):
                fields[field, node] = trees.fields[i, field, place]
            probs[node], sources[node] = trees.probs[i, place], trees.sources[i, place]
    return fields[0], fields[1], probs, fields[2], sources, firsts
