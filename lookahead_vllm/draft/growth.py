"""Draft trees, grown best first.

Source: hierarchical multi-branch drafts, Lookahead (KDD 2024), section 4.1: branches that share a
prefix share its nodes, and the best nodes are kept where there are too many.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.acceptance_rate import Rates, Weights, judge, room_for_judging, weight_set
from lookahead_vllm.draft.continuation import (
    ANSWERS,
    MAX_CONTINUATIONS,
    OWN,
    REFERENCE,
    TOKEN,
    find_continuations,
    room_for_continuations,
)
from lookahead_vllm.draft.kernel import Ints, Words, kernel
from lookahead_vllm.draft.suffix import ROW, Hashes, advance

LEAST_PROBABILITY = 0.001  # a node less likely than this is never drafted

SINGLE, PARALLEL, HIERARCHICAL = range(3)
"""Where a tree may branch: nowhere, at the root alone, everywhere."""


@kernel
def grow_all(
    edges: Words,
    live: Ints,
    all_spaces: Ints,
    all_rows: Hashes,
    texts: Words,
    rates: Rates,
    weights: Weights,
    max_nodes: Words,
    max_depths: Words,
    branching: Words,
    least: float,
) -> tuple[Ints, Ints, NDArray[np.float32], Ints, NDArray[np.uint8], Words]:
    """Grow a tree for each of `texts` int64 [t], which are rows of `all_spaces` and `all_rows`.

    `max_nodes`, `max_depths` and `branching` are int64 [t]; nodes less likely than `least` are
    left out. Returns the fields of a DraftForest.
    """
    most = max_nodes.sum()
    nodes = np.empty((3, most), np.int32)
    probs, sources = np.empty(most, np.float32), np.empty(most, np.uint8)
    firsts = np.zeros(len(texts) + 1, np.int64)
    # Row i + 1 is the text that ends in node i.
    rows = np.empty((max_nodes.max() + 1 if len(texts) else 1, ROW), np.uint64)
    found, longest, places = room_for_continuations()
    which, inputs = room_for_judging()
    shares = np.empty(MAX_CONTINUATIONS, np.float32)
    least_prob = np.float32(max(least, LEAST_PROBABILITY))
    size = 0
    for i, text in enumerate(texts):
        rows[0] = all_rows[text]
        size += _grow(
            edges,
            live,
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
def _grow(
    edges: Words,
    live: Ints,
    spaces: Ints,
    rows: Hashes,
    rates: Rates,
    weights: Weights,
    max_nodes: int,
    max_depth: int,
    branching: int,
    least: np.float32,
    found: Ints,
    longest: Ints,
    places: Words,
    which: Ints,
    inputs: Rates,
    shares: Rates,
    nodes: Ints,
    probs: Rates,
    sources: NDArray[np.uint8],
) -> int:
    """Take the likeliest node, look at what may follow it, and so on; returns how many there are.

    Fills `nodes` (tokens, parents, depths), `probs` and `sources`: parents before children, `probs`
    falling or equal. A node's probability is its parent's times the learned acceptance rate of
    its evidence; siblings never add up to more than their parent.
    """
    # The buds, likeliest first: nodes that may be taken next.
    buds = [(np.float32(0), np.int32(0), np.int32(0), np.uint8(0)) for _ in range(0)]

    size, here, depth, prob = 0, -1, 0, np.float32(1.0)
    while size < max_nodes:
        if depth < max_depth:
            num_found = find_continuations(
                edges, live, spaces, rows[here + 1], found, longest, places
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
                if shares[i] * scale >= least and (i == best or not alone):
                    source = np.uint8(
                        REFERENCE if found[i, REFERENCE] else OWN if found[i, OWN] else ANSWERS
                    )
                    bud = (-shares[i] * scale, np.int32(here), found[i, TOKEN], source)
                    heapq.heappush(buds, bud)
        if len(buds) == 0:
            break
        minus_prob, parent, token, source = heapq.heappop(buds)
        depth = 1 if parent < 0 else nodes[2, parent] + 1
        here, prob = size, -minus_prob
        nodes[0, here], nodes[1, here], nodes[2, here], probs[here] = token, parent, depth, prob
        sources[here] = source
        advance(rows[parent + 1], token, rows[here + 1])
        size += 1
    return size
