"""Sample, then match: the walk that makes a draft tree lossless.

The target model's token is sampled at every node first, with the request's own sampling
parameters; then the walk goes from the root to the child that carries the sampled token, as far
as there is one. For drafts without probabilities of their own this is SpecInfer's multi-step
verification (section 4.3) and Algorithm 4 of Lookahead Decoding in distribution, with greedy
decoding as the special case.
"""

from __future__ import annotations

import numpy as np

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest


def accepted_paths(forest: DraftForest, at_roots: Int32s, at_nodes: Int32s) -> Int32s:
    """The nodes that the target model agrees with.

    Parameters
    ----------
    forest
        t trees of n nodes together.
    at_roots : int32 [t]
        The token that the target model chose at each root.
    at_nodes : int32 [n]
        And at each node.

    Returns
    -------
    int32 [t, longest path]
        The accepted nodes' numbers within their tree from the root down, then -1. The tokens to
        emit are the choice at the root and those at these nodes.
    """
    paths = _walk(forest.tokens, forest.parents, forest.firsts, at_roots, at_nodes)
    return paths[:, : (paths >= 0).any(axis=0).sum()]


@kernel
def _walk(
    tokens: Int32s, parents: Int32s, firsts: Int64s, at_roots: Int32s, at_nodes: Int32s
) -> Int32s:
    longest = 0
    for tree in range(len(firsts) - 1):
        longest = max(longest, firsts[tree + 1] - firsts[tree])
    paths = np.full((len(firsts) - 1, longest), -1, np.int32)
    for tree in range(len(firsts) - 1):
        here, wanted, length = -1, at_roots[tree], 0
        # Parents stand before children, so one pass meets the path's nodes in order.
        for place in range(firsts[tree + 1] - firsts[tree]):
            node = firsts[tree] + place
            if parents[node] == here and tokens[node] == wanted:
                paths[tree, length] = place
                here, wanted, length = place, at_nodes[node], length + 1
    return paths
