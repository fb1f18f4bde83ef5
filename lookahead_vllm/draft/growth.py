"""One draft tree, grown best first.

Source: hierarchical multi-branch drafts, Lookahead (KDD 2024), section 4.1: branches that share a
prefix share its nodes, and the best nodes are kept where there are too many.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead_vllm.draft.acceptance_rate import Rates
from lookahead_vllm.draft.continuation import MAX_CONTINUATIONS, find_continuations
from lookahead_vllm.draft.trie import Ints, Nodes, advance, match_suffixes

LEAST_PROBABILITY = 0.01  # a node less likely than this is never drafted


@njit(cache=True)
def grow(
    nodes: Nodes,
    edges: Ints,
    own_root: int,
    answers_root: int,
    tail: Ints,
    max_suffix: int,
    prompt_weight: float,
    rates: Rates,
    max_nodes: int,
    max_depth: int,
    may_branch: bool,
) -> tuple[Ints, Ints, NDArray[np.float32]]:
    """Take the likeliest node, look at what may follow it, and so on.

    Returns `tokens` int32 [n], `parents` int32 [n] and `probs` float32 [n], as in DraftTree:
    parents before children, `probs` falling or equal. A node's probability is its parent's times
    the learned acceptance rate of its evidence. Without `may_branch`, the best chain.
    """
    tokens = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    probs = np.empty(max_nodes, np.float32)
    depths = np.empty(max_nodes, np.int32)
    # Row i + 1 is the text that ends in node i, row 0 the one that ends in the root.
    own = np.empty((max_nodes + 1, max_suffix + 1), np.int32)
    answers = np.empty((max_nodes + 1, max_suffix + 1), np.int32)
    match_suffixes(nodes, edges, own_root, tail, own[0])
    match_suffixes(nodes, edges, answers_root, tail, answers[0])

    found_tokens = np.empty(MAX_CONTINUATIONS, np.int32)
    found_buckets = np.empty(MAX_CONTINUATIONS, np.int32)
    # The buds: nodes that may be taken next.
    bud_tokens = np.empty((max_nodes + 1) * MAX_CONTINUATIONS, np.int32)
    bud_parents = np.empty_like(bud_tokens)
    bud_probs = np.empty(len(bud_tokens), np.float32)
    buds = 0

    size, here, depth, prob = 0, -1, 0, np.float32(1.0)
    while size < max_nodes:
        if depth < max_depth:
            found = find_continuations(
                nodes,
                edges,
                own[here + 1],
                answers[here + 1],
                prompt_weight,
                found_tokens,
                found_buckets,
            )
            first = buds
            for i in range(found):
                bucket = found_buckets[i]
                bud_prob = np.float32(prob * (rates[bucket, 0] / rates[bucket, 1]))
                if bud_prob < LEAST_PROBABILITY:
                    continue
                at = buds
                if not may_branch and buds > first:
                    if bud_prob <= bud_probs[first]:
                        continue
                    at = first
                bud_tokens[at] = found_tokens[i]
                bud_parents[at] = here
                bud_probs[at] = bud_prob
                buds = at + 1
        if buds == 0:
            break
        best = np.argmax(bud_probs[:buds])
        parent, prob = bud_parents[best], bud_probs[best]
        depth = 1 if parent < 0 else depths[parent] + 1
        here = size
        tokens[here], parents[here], probs[here] = bud_tokens[best], parent, prob
        depths[here] = depth
        advance(nodes, edges, own[parent + 1], tokens[here], own[here + 1])
        advance(nodes, edges, answers[parent + 1], tokens[here], answers[here + 1])
        size += 1
        buds -= 1
        bud_tokens[best] = bud_tokens[buds]
        bud_parents[best] = bud_parents[buds]
        bud_probs[best] = bud_probs[buds]
    return tokens[:size], parents[:size], probs[:size]
