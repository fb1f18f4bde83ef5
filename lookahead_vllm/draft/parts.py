"""The parts of a forest that several devices verify at once.

Source: Lookahead Decoding (ICML 2024), section 3.4, which splits its window and its candidates.
Here any draft trees are split.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest


class ForestParts(NamedTuple):
    """A forest of n nodes, cut into d parts; each part has all ancestors of its nodes."""

    owners: Int64s
    """int64 [n]: the part that owns each node; other parts may contain it as an ancestor."""
    contains: NDArray[np.bool_]
    """bool [d, n]: the nodes of each part."""


def cut_into_parts(forest: DraftForest, num_parts: int, is_whole: NDArray[np.bool_]) -> ForestParts:
    """Cut a forest so that the largest part is as small as a cut in depth-first order allows.

    A part is a range of the nodes in depth-first order, and the ancestors of the first one. So two
    neighbouring parts share no more than one branch. Trees that are `is_whole`, bool [t], are in
    every part; the first part owns them.
    """
    owners, contains = _cut(forest.parents, forest.depths, forest.firsts, num_parts, is_whole)
    return ForestParts(owners, contains)


@kernel
def _cut(
    parents: Int32s,
    depths: Int32s,
    firsts: Int64s,
    num_parts: int,
    is_whole: NDArray[np.bool_],
) -> tuple[Int64s, NDArray[np.bool_]]:
    """The fields of the ForestParts."""
    num_nodes = len(parents)
    order = np.empty(num_nodes, np.int64)  # the nodes that are split, depth first
    num_split = 0
    sizes = np.ones(num_nodes, np.int64)  # of the subtree below and with each node
    next_places = np.empty(num_nodes, np.int64)  # of the next child, in `order`
    for tree in range(len(firsts) - 1):
        if is_whole[tree]:
            continue
        first, end = firsts[tree], firsts[tree + 1]
        for node in range(end - 1, first - 1, -1):
            if parents[node] >= 0:
                sizes[first + parents[node]] += sizes[node]
        for node in range(first, end):
            if parents[node] < 0:
                place = num_split
                num_split += sizes[node]
            else:
                parent = first + parents[node]
                place = next_places[parent]
                next_places[parent] += sizes[node]
            order[place] = node
            next_places[node] = place + 1
    low, high = -(-num_split // num_parts), num_split
    while low < high:
        limit = (low + high) // 2
        if _parts_of(order[:num_split], depths, limit) <= num_parts:
            high = limit
        else:
            low = limit + 1
    owners = np.zeros(num_nodes, np.int64)
    contains = np.zeros((num_parts, num_nodes), np.bool_)
    part, size = 0, 0
    for place in range(num_split):
        node = order[place]
        size += 1
        if size > low:
            part, size = part + 1, depths[node]
        owners[node] = part
    for tree in range(len(firsts) - 1):
        first = firsts[tree]
        for node in range(firsts[tree + 1] - 1, first - 1, -1):
            if is_whole[tree]:
                contains[:, node] = True
                continue
            contains[owners[node], node] = True
            if parents[node] >= 0:
                contains[:, first + parents[node]] |= contains[:, node]
    return owners, contains


@kernel
def _parts_of(order: Int64s, depths: Int32s, limit: int) -> int:
    """How many parts of at most `limit` nodes the nodes of `order` need; too many if one cannot."""
    parts, size = 1, 0
    for node in order:
        size += 1
        if size > limit:
            # A new part begins with the node and its ancestors.
            parts, size = parts + 1, depths[node]
            if size > limit:
                return len(order) + 1
    return parts
