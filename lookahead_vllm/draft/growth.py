"""One draft tree, grown best first.

Source: hierarchical multi-branch drafts, Lookahead (KDD 2024), section 4.1: branches that share a
prefix share its nodes, and the best nodes are kept where there are too many.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.acceptance_rate import Rates, Weights, judge, room_for_judging, weight_set
from lookahead_vllm.draft.continuation import (
    MAX_CONTINUATIONS,
    TOKEN,
    find_continuations,
    room_for_continuations,
)
from lookahead_vllm.draft.kernel import kernel
from lookahead_vllm.draft.suffix import ROW, Hashes, advance
from lookahead_vllm.draft.trie import Ints, Words

LEAST_PROBABILITY = 0.001  # a node less likely than this is never drafted

SINGLE, PARALLEL, HIERARCHICAL = range(3)
"""Where a tree may branch: nowhere, at the root alone, everywhere."""


@kernel
def grow(
    edges: Words,
    live: Ints,
    spaces: Ints,
    row: Hashes,
    rates: Rates,
    weights: Weights,
    max_nodes: int,
    max_depth: int,
    branching: int,
) -> tuple[Ints, Ints, Ints, NDArray[np.float32]]:
    """Take the likeliest node, look at what may follow it, and so on.

    Returns `tokens`, `parents` and `depths`, int32 [n], and `probs` float32 [n], as in DraftTree:
    parents before children, `probs` falling or equal. A node's probability is its parent's times
    the learned acceptance rate of its evidence; siblings never add up to more than their parent.
    """
    nodes = np.empty((3, max_nodes), np.int32)
    probs = np.empty(max_nodes, np.float32)
    rows = np.empty((max_nodes + 1, ROW), np.uint64)  # row i + 1 is the text that ends in node i
    rows[0] = row

    found, longest, places = room_for_continuations()
    which, inputs = room_for_judging()
    shares = np.empty(MAX_CONTINUATIONS, np.float32)
    # The buds, likeliest first: nodes that may be taken next.
    buds = [(np.float32(0), np.int32(0), np.int32(0)) for _ in range(0)]

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
                if shares[i] * scale >= LEAST_PROBABILITY and (i == best or not alone):
                    heapq.heappush(buds, (-shares[i] * scale, np.int32(here), found[i, TOKEN]))
        if len(buds) == 0:
            break
        minus_prob, parent, token = heapq.heappop(buds)
        depth = 1 if parent < 0 else nodes[2, parent] + 1
        here, prob = size, -minus_prob
        nodes[0, here], nodes[1, here], nodes[2, here], probs[here] = token, parent, depth, prob
        advance(rows[parent + 1], token, rows[here + 1])
        size += 1
    return nodes[0, :size], nodes[1, :size], nodes[2, :size], probs[:size]
