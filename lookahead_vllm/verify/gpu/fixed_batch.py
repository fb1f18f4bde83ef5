"""Buffers for the trees of a step that a captured CUDA graph runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lookahead_vllm.draft.jit import Int32s, kernel
from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
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
        entries, *_, num_tokens = self._lengths
        packed = np.zeros(len(self._packed), np.int32)
        self.num_trees = 0 if trees is None else len(trees)
        columns, depths, masks = _NOTHING
        if trees is not None:
            fields = (trees.rows, trees.starts, trees.sizes, trees.contexts)
            columns = np.stack([field.numpy() for field in fields])
            depths, masks = trees.depths.numpy(), trees.masks.numpy()
            largest, longest = columns[2:].max(axis=1).tolist()
            if (
                len(trees) > entries
                or len(depths) > num_tokens
                or largest > self.batch.max_size
                or longest > self.batch.max_context
            ):
                raise ValueError(
                    f"{len(trees)} trees of {len(depths)} rows, at most {largest} in one, after up "
                    f"to {longest} tokens, do not fit into buffers of {self.batch.shape}"
                )
        _write(packed, entries, num_tokens, self._words, columns, depths, masks)
        self._packed.copy_(staged(packed, self._packed.device), non_blocking=True)


_NOTHING: tuple[Int32s, ...] = tuple(np.empty(shape, np.int32) for shape in ((4, 0), 0, (0, 1)))


@kernel
def _write(
    packed: Int32s,
    entries: int,
    num_tokens: int,
    words: int,
    columns: Int32s,
    depths: Int32s,
    masks: Int32s,
) -> None:
    """Lay out t trees of n rows in zeros.

    Parameters
    ----------
    packed : int32 [5 * entries + (2 + words) * num_tokens]
    columns : int32 [4, t]
        Rows, starts, sizes and contexts.
    depths : int32 [n]
    masks : int32 [n, at most words]
    """
    row_depths = packed[5 * entries :]
    row_masks, tokens = row_depths[num_tokens:], row_depths[(1 + words) * num_tokens :]
    row = 0
    for tree in range(columns.shape[1]):
        for column in range(4):
            packed[column * entries + tree] = columns[column, tree]
        packed[4 * entries + tree] = row
        for place in range(columns[2, tree]):
            row_depths[row] = depths[row]
            tokens[row] = columns[1, tree] + place
            for word in range(masks.shape[1]):
                row_masks[row * words + word] = masks[row, word]
            row += 1
    tokens[row:] = -1
