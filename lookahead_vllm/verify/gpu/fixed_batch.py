"""Buffers for the trees of a step that a captured CUDA graph runs."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from lookahead_vllm.verify.gpu.paged_batch import PagedBatch, query_tokens
from lookahead_vllm.verify.transfer import staged

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    room : int
        Words for what a step copies together with its trees.

    Attributes
    ----------
    batch : PagedBatch
        The buffers, with room for every step of `num_tokens` tokens.
    num_trees : int
        The trees of the current step; they are the first entries.
    more : int32 [room]
        What was copied together with the trees.
    """

    def __init__(
        self,
        num_tokens: int,
        max_requests: int,
        max_size: int,
        max_context: int,
        device: torch.device | str,
        room: int = 0,
    ) -> None:
        entries = min(max_requests, num_tokens // _MIN_ROWS)
        max_size = min(max_size, num_tokens)
        self._words = (max_size + 31) // 32
        self._lengths = [*[entries] * 5, num_tokens, num_tokens * self._words, num_tokens]
        # `fill` writes every value before one is read.
        size = sum(self._lengths) + room
        self._packed = torch.empty(size, dtype=torch.int32, device=device)
        *parts, self.more = self._packed.split([*self._lengths, room])
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

    def fill(self, trees: TreeBatch | None, more: NDArray[np.int32] | None = None) -> None:
        """Write the trees of a step, in one asynchronous copy.

        Parameters
        ----------
        trees
            All branching trees of the step; None if there are none.
        more : int32 [at most `room`], optional
            Goes to the beginning of `self.more`.

        Raises
        ------
        ValueError
            They do not fit.
        """
        size = sum(self._lengths)
        packed = np.zeros(size + (0 if more is None else len(more)), np.int32)
        if more is not None:
            packed[size:] = more
        parts = np.split(packed[:size], list(accumulate(self._lengths[:-1])))
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
        target = self._packed[: len(packed)]
        target.copy_(staged(packed, target.device), non_blocking=True)
