"""The requests of one forward pass, laid out for attention on a GPU: trees, chains, prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.verify.transfer import to_device

if TYPE_CHECKING:  # imports numba, and `scripts/gpu_check.py` runs without it
    from lookahead_vllm.verify.layout.tree_batch import TreeBatch

CAUSAL = -1
"""In `PagedBatch.firsts`: the request has no mask; its rows attend causally."""


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Rows of requests over a paged KV cache; a request's rows are consecutive query tokens.

    The K/V of row j are in the request's KV slot `context + j`. The row attends to the slots
    0..context-1 and to the rows of its own request that its mask selects. In a chain or a prompt,
    these are all rows up to itself.

    Attributes
    ----------
    requests : int32 [r]
        The request's row of the block table.
    starts : int32 [r]
        Its first row among the flattened query tokens.
    sizes : int32 [r]
        Number of its rows; 0 for an unused entry of a fixed buffer.
    contexts : int32 [r]
        Tokens before its first row; they are in the cache.
    firsts : int32 [r]
        Its first row of `depths` and `masks`, or CAUSAL.
    places : int32 [r]
        Its first entry of `tokens`.
    depths : int32 [n]
        Depth of each row of a tree, the root 0. The row's position is context + depth.
    masks : int32 [n, w], w = ceil(max(sizes of trees) / 32)
        Bit j % 32 of word j // 32 is set if the row attends to row j of its tree: itself or an
        ancestor.
    tokens : int32 [m], m = sum(sizes)
        Index of each row of all requests among the flattened query tokens; -1 for an unused entry
        of a fixed buffer.
    max_size, max_context : int
        Upper bounds of `sizes` and `contexts`, known without a synchronisation.
    expected_requests : int, optional
        How many requests of a fixed buffer usually have rows; all by default. The fewer they are,
        the more parts a context is split into.
    """

    requests: Tensor
    starts: Tensor
    sizes: Tensor
    contexts: Tensor
    firsts: Tensor
    places: Tensor
    depths: Tensor
    masks: Tensor
    tokens: Tensor
    max_size: int
    max_context: int
    expected_requests: int | None = None

    @classmethod
    def build(cls, trees: TreeBatch, device: torch.device | str = "cpu") -> PagedBatch:
        """Lay out trees; makes one asynchronous copy to the device."""
        firsts = trees.sizes.cumsum(0, dtype=torch.int32) - trees.sizes
        tokens = torch.from_numpy(query_tokens(trees.starts.numpy(), trees.sizes.numpy()))
        columns = trees.requests, trees.starts, trees.sizes, trees.contexts, firsts
        parts = [*columns, trees.depths, trees.masks.flatten(), tokens]
        copied = to_device(torch.cat(parts), device).split([len(part) for part in parts])
        requests, starts, sizes, contexts, firsts, depths, masks, tokens = copied
        max_size, max_context = (max(column.tolist(), default=0) for column in columns[2:4])
        return cls(
            requests, starts, sizes, contexts, firsts, firsts, depths,
            masks.view(trees.masks.shape), tokens, max_size, max_context,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.sizes)


def query_tokens(starts: NDArray[np.int32], sizes: NDArray[np.int32]) -> NDArray[np.int32]:
    """`PagedBatch.tokens` for requests with these `starts` and `sizes`."""
    ends = np.cumsum(sizes, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) + np.repeat(starts + sizes - ends, sizes)


def empty_batches(max_size: int, device: torch.device) -> Iterator[PagedBatch]:
    """Batches without rows, with which launches have no effect: a context is split or not."""
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    for max_context in (0, 1 << 20):  # not split, and split
        yield PagedBatch(
            zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros[None], zeros - 1,
            max_size, max_context,
        )  # fmt: skip
