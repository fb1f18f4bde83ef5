"""Lossless acceptance of draft trees: sample at every node, then match.

The target model's token is sampled at every node with the request's sampling parameters. Then a
walk starts at the root and moves to the child that has the sampled token, until there is none. For
drafts without probabilities, the output has the distribution of SpecInfer's multi-step verification
(section 4.3) and of Algorithm 4 of Lookahead Decoding. Greedy decoding is a special case.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.sources import NAMES
from lookahead_vllm.draft.tree import DraftForest, find_branching


def accepted_paths(forest: DraftForest, at_roots: Int32s, at_nodes: Int32s) -> Int32s:
    """The path of accepted nodes in each of t trees, int32 [t, longest path].

    The nodes are indices within their tree, from the root down, padded with -1. `at_roots`, int32
    [t], and `at_nodes`, int32 [n], are the tokens that were sampled there.
    """
    paths: Int32s = _accept(forest.tokens, forest.parents, forest.firsts, at_roots, at_nodes)
    return paths


@kernel
def _accept(
    tokens: Int32s, parents: Int32s, firsts: Int64s, at_roots: Int32s, at_nodes: Int32s
) -> Int32s:
    max_nodes = longest = 0
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
                longest = max(longest, length)
    return paths[:, :longest].copy()


def paths_of_tokens(forest: DraftForest, emitted: Int64s, num_emitted: Int32s) -> Int32s:
    """As `accepted_paths`, from the tokens that each request emitted in the step, int64 [t, m].

    `num_emitted`, int32 [t], says how many; the last one was sampled after the last accepted node.
    Valid trees have no equal siblings; of equal ones, the first counts.
    """
    paths: Int32s = _follow(forest.tokens, forest.parents, forest.firsts, emitted, num_emitted)
    return paths


@kernel
def _follow(
    tokens: Int32s, parents: Int32s, firsts: Int64s, emitted: Int64s, num_emitted: Int32s
) -> Int32s:
    num_trees, longest = len(firsts) - 1, 0
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
                longest = max(longest, length)
    return paths[:, :longest].copy()


class Tally(NamedTuple):
    """The trees of a step, counted; nodes by source."""

    verified: Int64s
    """int64 [len(sources.NAMES)], as `accepted`."""
    accepted: Int64s
    lengths: Int64s
    """int64 [1 + longest path]: the trees with nodes, by their accepted nodes."""
    branching: int
    """The trees that branch."""
    moved: int
    """The accepted nodes that do not follow their root yet."""


def tally(forest: DraftForest, paths: Int32s) -> Tally:
    """Count all nodes and the accepted ones; `paths` as in `accepted_paths`."""
    nodes = forest.parents, forest.sources, forest.firsts
    return Tally(*_tally(*nodes, paths, len(NAMES)))


@kernel
def _tally(
    parents: Int32s, sources: NDArray[np.uint8], firsts: Int64s, paths: Int32s, num_sources: int
) -> tuple[Int64s, Int64s, Int64s, int, int]:
    moved = 0
    verified, accepted = np.zeros(num_sources, np.int64), np.zeros(num_sources, np.int64)
    lengths = np.zeros(paths.shape[1] + 1, np.int64)
    for source in sources:
        verified[source] += 1
    for tree in range(len(paths)):
        length = 0
        for node in paths[tree]:
            if node >= 0:
                accepted[sources[firsts[tree] + node]] += 1
                moved += node != length
                length += 1
        lengths[length] += firsts[tree + 1] > firsts[tree]
    return verified, accepted, lengths, find_branching(parents, firsts).sum(), moved


@kernel
def emitted_tokens(
    firsts: Int64s, requests: Int64s, paths: Int32s, at_roots: Int32s, at_nodes: Int32s
) -> Int32s:
    """The tokens that each request emits: the choice at its root, then those at accepted nodes.

    They are int32 [r, 1 + longest path], padded with -1. `firsts` is that of a DraftForest,
    `requests`, int64 [t], the request of each tree, and `paths` as in `accepted_paths`. `at_roots`,
    int32 [r], has an entry for every request.
    """
    tokens = np.full((len(at_roots), 1 + paths.shape[1]), -1, np.int32)
    tokens[:, 0] = at_roots
    for tree in range(len(requests)):
        for i, node in enumerate(paths[tree]):
            if node >= 0:
                tokens[requests[tree], 1 + i] = at_nodes[firsts[tree] + node]
    return tokens
