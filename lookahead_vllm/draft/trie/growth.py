"""Draft trees, grown best first.

Source: hierarchical multi-branch drafts, Lookahead (KDD 2024), section 4.1: branches that share a
prefix share its nodes, and if there are too many nodes, the best ones are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
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


@kernel
def bounds_of(tree: Int64s, limits: TreeLimits) -> tuple[int, int, int]:
    """The max_nodes and max_depth of one tree, and whether it may branch, 0 or 1."""
    max_nodes = max(min(tree[NODES], limits.max_nodes), 0)
    max_depth = max(min(tree[DEPTH], limits.max_depth), 0)
    return max_nodes, max_depth, tree[MAY_BRANCH]


@kernel
def grow_all(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    trees: Int64s,
    learned: RateArrays,
    limits: TreeLimits,
) -> tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]:
    """Grow the `trees` int64 [t, 4]; returns the fields of a DraftForest.

    `lines` are those of `recycling.py`; there may be none.
    """
    trie, texts, learned = TrieArrays(*trie), TextArrays(*texts), RateArrays(*learned)
    limits = TreeLimits(*limits)
    capacity, largest = 0, 0
    for i in range(len(trees)):
        max_nodes = bounds_of(trees[i], limits)[0]
        capacity, largest = capacity + max_nodes, max(largest, max_nodes)
    fields = np.empty((3, capacity), np.int32)
    probs, sources = np.empty(capacity, np.float32), np.empty(capacity, np.uint8)
    firsts = np.zeros(len(trees) + 1, np.int64)
    # Reused for every tree, and passed one by one: nested in a NamedTuple they cost 2 µs a step.
    hashes = np.empty((largest + 1, NUM_HASHES), np.uint64)
    places = np.empty(largest + 1, np.int32)
    candidates, inputs = new_candidates(), new_inputs()
    shares = np.empty(MAX_ALL_CANDIDATES, np.float32)
    min_prob = np.float32(max(limits.min_prob, MIN_PROBABILITY))
    size = 0
    for i in range(len(trees)):
        row = trees[i, ROW]
        hashes[0] = texts.hashes[row]
        size += grow(
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
            Nodes(fields[:, size:], probs[size:], sources[size:]),
        )
        firsts[i + 1] = size
    return (
        fields[0, :size].copy(),
        fields[1, :size].copy(),
        probs[:size].copy(),
        fields[2, :size].copy(),
        sources[:size].copy(),
        firsts,
    )


@kernel
def _source_of(evidence: Int32s) -> int:
    if evidence[REFERENCE]:
        return REFERENCE
    if evidence[OWN]:
        return OWN
    if evidence[ANSWERS] or evidence[CHOSEN] == 0:
        return ANSWERS
    if is_drafted(evidence[CHOSEN]):
        return DRAFTER
    return WINDOW if is_from_cell(evidence[CHOSEN]) else RECYCLED


@kernel
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
                probs[at], fields[0, at], fields[1, at] = likely, evidence[i, TOKEN], here
                sources[at] = _source_of(evidence[i])
        if num_buds == 0:
            break
        here, parent, prob = size, fields[1, size], probs[size]
        fields[2, here] = depth = 1 if parent < 0 else fields[2, parent] + 1
        advance(hashes[parent + 1], fields[0, here], hashes[here + 1])
        places[here + 1] = follow_chain(chain, places[parent + 1], fields[0, here])
        size, num_buds = size + 1, num_buds - 1
    return size
