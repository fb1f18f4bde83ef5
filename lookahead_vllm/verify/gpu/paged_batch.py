"""The requests of one forward pass, laid out for attention on a GPU: trees, chains, prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

if TYPE_CHECKING:  # imports numba, and `scripts/gpu_check.py` runs without it
    from lookahead_vllm.verify.tree_batch import TreeBatch

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
    rows : int32 [r]
        The request's row of the block table.
    starts : int32 [r]
        Its first row among the flattened query tokens.
    sizes : int32 [r]
        Number of its rows; 0 for an unused entry of a fixed buffer.
    contexts : int32 [r]
        Tokens before its first row; they are in the cache.
    firsts : int32 [r]
        Its first row of `depths` and `masks`, or CAUSAL.
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
        How many requests of a fixed buffer usually have rows. The more the context is split, the
        fewer they are. All by default.
    """

    rows: Tensor
    starts: Tensor
    sizes: Tensor
    contexts: Tensor
    firsts: Tensor
    depths: Tensor
    masks: Tensor
    tokens: Tensor
    max_size: int
    max_context: int
    expected_requests: int | None = None

    @classmethod
    def build(
        cls,
        trees: TreeBatch,
        device: torch.device | str = "cpu",
        *,
        causal: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike] | None = None,
    ) -> PagedBatch:
        """Lay out trees and, after them, `causal`: rows, starts, sizes, contexts of other requests.

        Makes one asynchronous copy to the device.
        """
        tree_sizes = trees.sizes.numpy()
        columns: Sequence[NDArray[np.int32]] = (
            trees.rows.numpy(),
            trees.starts.numpy(),
            tree_sizes,
            trees.contexts.numpy(),
            np.cumsum(tree_sizes, dtype=np.int32) - tree_sizes,
        )
        if causal is not None:
            added = [np.asarray(column, np.int32) for column in causal]
            added.append(np.full_like(added[0], CAUSAL))
            columns = [np.concatenate(pair) for pair in zip(columns, added, strict=True)]
        max_size, max_context = (int(columns[i].max(initial=0)) for i in (2, 3))
        tokens = torch.from_numpy(query_tokens(columns[1], columns[2]))
        parts = [*map(torch.from_numpy, columns), trees.depths, trees.masks.flatten(), tokens]
        packed = torch.cat(parts)
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory()
        tensors = packed.to(device, non_blocking=True).split([len(part) for part in parts])
        rows, starts, sizes, contexts, firsts, depths, masks, tokens = tensors
        return cls(
            rows,
            starts,
            sizes,
            contexts,
            firsts,
            depths,
            masks.view(trees.masks.shape),
            tokens,
            max_size,
            max_context,
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def copy_from(self, batch: PagedBatch) -> None:
        """Copy `batch` into these buffers, over which a CUDA graph was captured.

        Raises
        ------
        ValueError
            It does not fit.
        """
        words = self.masks.shape[1]
        if (
            len(batch) > len(self)
            or len(batch.depths) > len(self.depths)
            or batch.masks.shape[1] > words
            or len(batch.tokens) > len(self.tokens)
            or batch.max_size > self.max_size
            or batch.max_context > self.max_context
        ):
            raise ValueError(f"{batch.shape} does not fit into buffers of {self.shape}")
        self.sizes.zero_()
        self.tokens.fill_(-1)
        for field in fields(self):
            buffer, new = getattr(self, field.name), getattr(batch, field.name)
            if field.name == "masks":
                buffer[: len(new), : new.shape[1]] = new
            elif isinstance(new, Tensor):
                buffer[: len(new)] = new

    @property
    def shape(self) -> dict[str, int]:
        """Its dimensions, by name."""
        return {
            "requests": len(self),
            "nodes": len(self.depths),
            "mask words": self.masks.shape[1],
            "rows": len(self.tokens),
            "max_size": self.max_size,
            "max_context": self.max_context,
        }


def query_tokens(starts: NDArray[np.int32], sizes: NDArray[np.int32]) -> NDArray[np.int32]:
    """`PagedBatch.tokens` of requests with these `starts` and `sizes`."""
    ends = np.cumsum(sizes, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) + np.repeat(starts + sizes - ends, sizes)


class PagedCall(NamedTuple):
    """The checked arguments of `paged_attention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    output: Tensor
    block_table: Tensor
    batch: PagedBatch
    scale: float
    sliding_window: int
    alibi_slopes: Tensor | None
    logits_soft_cap: float
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
