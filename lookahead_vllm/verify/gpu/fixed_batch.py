"""Buffers for the trees of a step that a captured CUDA graph runs."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from lookahead_vllm.verify.gpu.paged_batch import PagedBatch, query_tokens
from lookahead_vllm.verify.transfer import staged

if TYPE_CHECKING:
    from lookahead_vllm.verify.tree_batch import TreeBatch

ROWS_OF_A_TREE = 8
"""The expected tokens of a step for each of its trees; determines how a context is split."""

_MIN_ROWS = 3  # of a branching tree: the root and two children


class FixedBatch:
    """A `PagedBatch` of branching trees whose tensors never move.

    All tensors are parts of one, so a step fills them in one copy. Entries without a tree have size
    0, rows without a tree token -1.

    Parameters
    ----------
    num_tokens : int
        The tokens of the graph.
    max_requests : int
        The most requests of a step.
    max_size : int
        The most rows of a tree, its root included.
    max_context : int
        The longest context.
    device

    Attributes
    ----------
    batch : PagedBatch
        The buffers, with room for every step of `num_tokens` tokens.
    num_trees : int
        The trees of the current step; they are the first entries.
    """

    def __init__(
        self,
        num_tokens: int,
        max_requests: int,
        max_size: int,
        max_context: int,
        device: torch.device | str,
    ) -> None:
        entries = min(max_requests, num_tokens // _MIN_ROWS)
        max_size = min(max_size, num_tokens)
        self._words = (max_size + 31) // 32
        self._lengths = [*[entries] * 5, num_tokens, num_tokens * self._words, num_tokens]
        # `fill` writes every value before one is read.
        self._packed = torch.empty(sum(self._lengths), dtype=torch.int32, device=device)
        parts = self._packed.split(self._lengths)
        rows, starts, sizes, contexts, firsts, depths, masks, tokens = parts
        self.batch = PagedBatch(
            rows,
            starts,
            sizes,
            contexts,
            firsts,
            firsts,  # all requests have trees
            depths,
            masks.view(num_tokens, self._words),
            tokens,
            max_size,
            max_context,
            max(1, min(entries, num_tokens // ROWS_OF_A_TREE)),
        )
        self.num_trees = 0
        self.fill(None)

    def fill(self, trees: TreeBatch | None) -> None:
        """Write the trees of a step, in one asynchronous copy.

        Parameters
        ----------
        trees
            All branching trees of the step; None if there are none.

        Raises
        ------
        ValueError
            They do not fit.
        """
        packed = np.zeros(sum(self._lengths), np.int32)
        parts = np.split(packed, list(accumulate(self._lengths[:-1])))
        tokens = parts.pop()
        tokens[:] = -1
        self.num_trees = 0 if trees is None else len(trees)
        if trees is not None:
            starts, sizes = trees.starts.numpy(), trees.sizes.numpy()
            rows, words = trees.masks.shape
            longest = int(trees.contexts.max())
            if (
                len(trees) > len(parts[0])
                or rows > len(tokens)
                or sizes.max() > self.batch.max_size
                or longest > self.batch.max_context
            ):
                raise ValueError(
                    f"{len(trees)} trees of {rows} rows, at most {sizes.max()} in one, after up to "
                    f"{longest} tokens, do not fit into buffers of {self.batch.shape}"
                )
            ends = np.cumsum(sizes, dtype=np.int32)
            columns = (trees.rows.numpy(), starts, sizes, trees.contexts.numpy(), ends - sizes)
            for part, column in zip(parts, columns, strict=False):
                part[: len(trees)] = column
            parts[5][:rows] = trees.depths.numpy()
            masks = parts[6].reshape(-1, self._words)
            masks[:rows, :words] = trees.masks.numpy()
            tokens[:rows] = query_tokens(starts, sizes)
        self._packed.copy_(staged(packed, self._packed.device), non_blocking=True)
