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


def paths_of_tokens(forest: DraftForest, emitted: Int64s, num_emitted: Int32s) -> Int32s:
    """The path of accepted nodes in each tree, found from the tokens that were emitted.

    Parameters
    ----------
    forest
        t trees.
    emitted : int64 [t, m]
        The tokens that each request emitted in the step that verified its tree.
    num_emitted : int32 [t]
        How many; the last one is the choice after the last accepted node.

    Returns
    -------
    int32 [t, longest path]
        As of `accepted_paths`. Of equal siblings, which trees do not have, it takes the first.
    """
    paths = _follow(forest.tokens, forest.parents, forest.firsts, emitted, num_emitted)
    return paths[:, : (paths >= 0).any(axis=0).sum()]


@kernel
def _follow(
    tokens: Int32s, parents: Int32s, firsts: Int64s, emitted: Int64s, num_emitted: Int32s
) -> Int32s:
    num_trees = len(firsts) - 1
    paths = np.full((num_trees, max(emitted.shape[1] - 1, 0)), -1, np.int32)
    for tree in range(num_trees):
        parent, length = -1, 0
        for place in range(firsts[tree + 1] - firsts[tree]):
            if length + 1 >= num_emitted[tree]:
                break
            node = firsts[tree] + place
            if parents[node] == parent and tokens[node] == emitted[tree, length]:
                paths[tree, length] = place
                parent, length = place, length + 1
    return paths
