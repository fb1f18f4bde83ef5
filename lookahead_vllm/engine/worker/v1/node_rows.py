"""The nodes of a step's trees as rows of a batch, with the history of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.verify.seeded_draws import GeneratorStates

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class NodeRows:
    """The nodes of a step's trees as rows of a batch, tree after tree.

    Parameters
    ----------
    requests
        The requests of the batch, by row.
    forest
        The draft trees of some of the requests.
    rows : int64 [t]
        The row of each tree's request, in ascending order.
    """

    def __init__(
        self, requests: Sequence[CachedRequestState], forest: DraftForest, rows: Int64s
    ) -> None:
        self.requests = requests
        self.forest = forest
        self.tree_rows = rows
        self.owners: Int64s = rows[forest.owners]
        """int64 [n]: the row of each node's request."""
        self._trees = {row: i for i, row in enumerate(rows.tolist()) if forest.sizes[i]}
        self._paths: dict[int, list[list[int]]] = {}

    def __len__(self) -> int:
        return self.forest.num_nodes

    @property
    def rows(self) -> Iterable[int]:
        """The requests that have nodes."""
        return self._trees.keys()

    def tree(self, row: int) -> DraftTree:
        """A request's draft tree."""
        return self.forest[self._trees[row]]

    def of(self, row: int) -> range:
        """The rows of one request's nodes."""
        if row not in self._trees:
            return range(0)
        tree = self._trees[row]
        return range(int(self.forest.firsts[tree]), int(self.forest.firsts[tree + 1]))

    def paths(self, row: int) -> list[list[int]]:
        """The draft tokens from the root to each node of a request, with the node's own."""
        if row not in self._paths:
            tree, paths = self.tree(row), list[list[int]]()
            for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
                paths.append([*(() if parent < 0 else paths[parent]), token])
            self._paths[row] = paths
        return self._paths[row]

    def histories(self, row: int) -> list[list[int]]:
        """The output token ids at each node of a request: the committed ones, then the path."""
        committed = self.requests[row].output_token_ids
        return [[*committed, *path] for path in self.paths(row)]

    def params(self, row: int) -> SamplingParams:
        """A request's sampling parameters."""
        params = self.requests[row].sampling_params
        assert params is not None  # pooling requests have no nodes
        return params

    def generators(self, states: Mapping[int, GeneratorStates]) -> dict[int, torch.Generator]:
        """The generators of the nodes of seeded requests, from the states by row of the batch."""
        return {
            node: states[row].generator_after(depth - 1)
            for row in self._trees.keys() & states.keys()
            for node, depth in zip(self.of(row), self.tree(row).depths.tolist(), strict=True)
        }

    def rows_where(self, applies: Callable[[SamplingParams], object]) -> list[int]:
        """The rows of requests that have nodes and whose sampling parameters satisfy `applies`."""
        return [row for row in self._trees if applies(self.params(row))]
