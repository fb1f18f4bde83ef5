"""Lossless acceptance of draft trees: sample at every node, then match.

The target model's token is sampled at every node with the request's sampling parameters. Then a
walk starts at the root and moves to the child that has the sampled token, until there is none. For
drafts without probabilities, the output has the distribution of SpecInfer's multi-step verification
(section 4.3) and of Algorithm 4 of Lookahead Decoding. Greedy decoding is a special case.
"""

from __future__ import annotations

import numpy as np

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest


def accepted_paths(forest: DraftForest, at_roots: Int32s, at_nodes: Int32s) -> Int32s:
    """The path of accepted nodes in each tree.

    Parameters
    ----------
    forest
        t trees with n nodes in total.
    at_roots, at_nodes : int32 [t], int32 [n]
        The tokens that the target model chose at the roots and at the nodes.

    Returns
    -------
    int32 [t, longest path]
        Indices of the accepted nodes within their tree, from the root down, padded with -1. The
        tokens to emit are the choice at the root and the choices at these nodes.
    """
    paths = _walk(forest.tokens, forest.parents, forest.firsts, at_roots, at_nodes)
    return paths[:, : (paths >= 0).any(axis=0).sum()]


@kernel
def _walk(
    tokens: Int32s, parents: Int32s, firsts: Int64s, at_roots: Int32s, at_nodes: Int32s
) -> Int32s:
    max_nodes = 0
    for tree in range(len(firsts) - 1):
        max_nodes = max(max_nodes, firsts[tree + 1] - firsts[tree])
    paths = np.full((len(firsts) - 1, max_nodes), -1, np.int32)
    for tree in range(len(firsts) - 1):
        parent, token, length = -1, at_roots[tree], 0
        # Parents precede their children, so one pass visits the path's nodes in order.
        for place in range(firsts[tree + 1] - firsts[tree]):
            node = firsts[tree] + place
            if parents[node] == parent and tokens[node] == token:
                paths[tree, length] = place
                parent, token, length = place, at_nodes[node], length + 1
    return paths
