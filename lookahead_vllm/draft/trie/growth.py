"""Draft trees, grown best first.

Source: hierarchical multi-branch drafts, Lookahead (KDD 2024), section 4.1: branches that share a
prefix share its nodes, and the best nodes are kept where there are too many.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.sources import ANSWERS, OWN, RECYCLED, REFERENCE, WINDOW
from lookahead_vllm.draft.trie.acceptance_rate import (
    Rates,
    Weights,
    judge,
    judging_scratch,
    weight_set,
)
from lookahead_vllm.draft.trie.candidates import (
    CHOICES,
    CHOSEN,
    MAX_CANDIDATES,
    TOKEN,
    candidate_scratch,
    find_candidates,
    look_up,
)
from lookahead_vllm.draft.trie.recycling import find_choices, is_from_cell
from lookahead_vllm.draft.trie.suffix import NUM_SUFFIXES, ORDERS, ROW, Hashes, advance

MIN_PROBABILITY = 0.001  # a node less likely than this is never drafted

MIN_CANDIDATES = 6
"""So many continuations of a node are looked at, however unlikely it is."""
MIN_SPARSE_PROBABILITY = 0.2
"""The probability from which on a node's sparse contexts are looked at too."""

SINGLE, PARALLEL, HIERARCHICAL = range(3)
"""Where a tree may branch: nowhere, at the root alone, everywhere."""


@kernel
def grow_all(
    edges: Int64s,
    live: Int32s,
    lines: Int32s,
    all_spaces: Int32s,
    all_rows: Hashes,
    texts: Int64s,
    rates: Rates,
    weights: Weights,
    max_nodes: Int64s,
    max_depths: Int64s,
    branching: Int64s,
    least: float,
) -> tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]:
    """Grow a tree for each of `texts` int64 [t], which are rows of `all_spaces` and `all_rows`.

    `edges` and `live` are the trie's, `lines` those of `recycling.py`, possibly none.
    `max_nodes`, `max_depths` and `branching` are int64 [t]; nodes less likely than `least` are
    left out. Returns the fields of a DraftForest.
    """
    most = max_nodes.sum()
    nodes = np.empty((3, most), np.int32)
    probs, sources = np.empty(most, np.float32), np.empty(most, np.uint8)
    firsts = np.zeros(len(texts) + 1, np.int64)
    # Row i + 1 is the text that ends in node i.
    rows = np.empty((max_nodes.max() + 1 if len(texts) else 1, ROW), np.uint64)
    found, longest, places = candidate_scratch()
    which, inputs = judging_scratch()
    shares = np.empty(MAX_CANDIDATES, np.float32)
    least_prob = np.float32(max(least, MIN_PROBABILITY))
    size = 0
    for i, text in enumerate(texts):
        rows[0] = all_rows[text]
        size += _grow(
            edges,
            live,
            lines,
            all_spaces[text],
            rows,
            rates,
            weights,
            max_nodes[i],
            max_depths[i],
            branching[i],
            least_prob,
            found,
            longest,
            places,
            which,
            inputs,
            shares,
            nodes[:, size:],
            probs[size:],
            sources[size:],
        )
        firsts[i + 1] = size
    return (
        nodes[0, :size].copy(),
        nodes[1, :size].copy(),
        probs[:size].copy(),
        nodes[2, :size].copy(),
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
    return WINDOW if is_from_cell(evidence[CHOSEN]) else RECYCLED


@kernel
def _grow(
    edges: Int64s,
    live: Int32s,
    lines: Int32s,
    spaces: Int32s,
    rows: Hashes,
    rates: Rates,
    weights: Weights,
    max_nodes: int,
    max_depth: int,
    branching: int,
    least: np.float32,
    found: Int32s,
    longest: Int32s,
    places: Int64s,
    which: Int32s,
    inputs: Rates,
    shares: Rates,
    nodes: Int32s,
    probs: Rates,
    sources: NDArray[np.uint8],
) -> int:
    """Take the likeliest node, look at what may follow it, and so on; returns how many there are.

    Fills `nodes` (tokens, parents, depths), `probs` and `sources`: parents before children, `probs`
    falling or equal. A node's probability is its parent's times the learned acceptance rate of
    its evidence; siblings never add up to more than their parent.
    """
    size, num_buds = 0, 0  # a bud is a node that may be taken next; they stand behind the nodes
    here, depth, prob = -1, 0, np.float32(1.0)
    while size < max_nodes:
        if depth < max_depth:
            # Of an unlikely node only the likeliest children can matter.
            most = MIN_CANDIDATES + np.int64((MAX_CANDIDATES - MIN_CANDIDATES) * prob)
            suffixes = NUM_SUFFIXES if prob >= MIN_SPARSE_PROBABILITY else len(ORDERS)
            look_up(edges, live, spaces, rows[here + 1], places, suffixes)
            num_found = find_candidates(edges, spaces, found, longest, places, most, suffixes)
            longest[CHOICES], num_found = find_choices(
                lines, spaces[CHOICES], rows[here + 1], found, num_found, most
            )
            chosen = weight_set(longest, spaces)
            total = np.float32(0)
            best = 0
            for i in range(num_found):
                shares[i] = judge(found, i, rates, weights, chosen, which, inputs)
                total += shares[i]
                if shares[i] > shares[best]:
                    best = i
            scale = prob / max(total, np.float32(1))
            alone = branching == SINGLE or (branching == PARALLEL and here >= 0)
            for i in range(num_found):
                likely = shares[i] * scale
                if likely < least or (alone and i != best):
                    continue
                if size + num_buds < max_nodes:
                    num_buds += 1
                elif likely <= probs[max_nodes - 1]:
                    continue
                at = size + num_buds - 1
                while at > size and probs[at - 1] < likely:
                    probs[at], sources[at] = probs[at - 1], sources[at - 1]
                    nodes[0, at], nodes[1, at] = nodes[0, at - 1], nodes[1, at - 1]
                    at -= 1
                probs[at], nodes[0, at], nodes[1, at] = likely, found[i, TOKEN], here
                sources[at] = _source_of(found[i])
        if num_buds == 0:
            break
        here, parent, prob = size, nodes[1, size], probs[size]
        nodes[2, here] = depth = 1 if parent < 0 else nodes[2, parent] + 1
        advance(rows[parent + 1], nodes[0, here], rows[here + 1])
        size, num_buds = size + 1, num_buds - 1
    return size
