"""Where the nodes of a step's trees are among the rows of its logits, on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest, ForestArrays, ForestFields
from lookahead_vllm.verify.transfer import to_device


class NodeLayout(NamedTuple):
    """The n logits rows of a step: for each request its root's, then its nodes' in list order."""

    parents: torch.Tensor
    """int32 [n]: the row of each row's parent; a root's is its own."""
    places: torch.Tensor
    """int32 [n]: how many rows each row is after its root's."""
    depths: torch.Tensor
    """int32 [n]: 0 at the roots."""
    width: int
    """At least 1 + the most nodes of any request; see `width_of`."""

    @property
    def shifts(self) -> torch.Tensor:
        """How far each row is from its place in a chain of the same rows, int32 [n]."""
        return self.depths - self.places

    @classmethod
    def build(
        cls, forest: DraftForest, requests: Int64s, cu_num_logits: Int32s, device: torch.device
    ) -> NodeLayout:
        """Lay out a step with t trees, whose requests are at the places `requests`, int64 [t].

        `cu_num_logits`, int32 [r + 1], has the first logits row of each request, then their number.
        """
        packed = _lay_out(forest.parents, forest.depths, forest.firsts, requests, cu_num_logits)
        parents, places, all_depths = to_device(packed, device)
        return cls(parents, places, all_depths, width_of(forest))


def width_of(forest: DraftForest) -> int:
    """The width of a table of the tokens that requests with these trees may emit."""
    return width_for(int(forest.sizes.max(initial=0)))


def width_for(most_nodes: int) -> int:
    """The width of such a table for trees of at most so many nodes.

    Never a multiple of 16: for such strides, Triton would compile the kernels of vLLM's that read
    the table once more, while requests wait for them.
    """
    width = 1 + most_nodes
    return width if width % 16 else width + 1


@kernel
def _lay_out(
    parents: Int32s, depths: Int32s, firsts: Int64s, requests: Int64s, cu_num_logits: Int32s
) -> Int32s:
    packed = np.zeros((3, cu_num_logits[-1]), np.int32)
    for request in range(len(cu_num_logits) - 1):
        root = cu_num_logits[request]
        packed[0, root] = root
    for tree in range(len(requests)):
        root, first = cu_num_logits[requests[tree]], firsts[tree]
        for place in range(firsts[tree + 1] - first):
            row = root + 1 + place
            packed[0, row] = root + 1 + parents[first + place]
            packed[1, row] = 1 + place
            packed[2, row] = depths[first + place]
    return packed


@kernel
def rows_of_nodes(forest: ForestFields, roots: Int32s) -> Int64s:
    """The rows of n nodes that follow their `roots`, int32 [t], without a gap.

    Returns int64 [3, n]: the row and the token of each node, and its `NodeLayout.shifts`.
    """
    forest = ForestArrays(*forest)
    nodes = np.empty((3, len(forest.tokens)), np.int64)
    for tree, root in enumerate(roots):
        first = forest.firsts[tree]
        for place in range(forest.firsts[tree + 1] - first):
            node = first + place
            nodes[0, node], nodes[1, node] = root + 1 + place, forest.tokens[node]
            nodes[2, node] = forest.depths[node] - 1 - place
    return nodes


def compile_layout() -> None:
    """Compile the kernels, so that no request waits for the compiler."""
    forest = DraftForest.of([])
    NodeLayout.build(forest, np.empty(0, np.int64), np.zeros(1, np.int32), torch.device("cpu"))
    rows_of_nodes(forest.arrays, np.empty(0, np.int32))
