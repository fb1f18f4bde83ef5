"""The requests of one forward pass, as attention on a GPU reads them: trees, chains and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

if TYPE_CHECKING:  # its layout is compiled, and `scripts/gpu_check.py` runs without numba
    from lookahead_vllm.verify.tree_batch import TreeBatch

CAUSAL = -1
"""In `PagedBatch.firsts`: each row sees those before it, and no mask is read."""


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Rows of requests over a paged KV cache; those of one are consecutive query tokens.

    Row j's K/V lie in the request's KV slot `context + j`. It sees the slots 0..context-1 and, of
    its own request's rows, those of its mask; in a chain or a prompt, all up to itself.

    Attributes
    ----------
    rows : int32 [r]
        The request's row of the block table.
    starts : int32 [r]
        Its first row among the flattened query tokens.
    sizes : int32 [r]
        Its rows; 0 for a place of a fixed buffer that nobody has.
    contexts : int32 [r]
        Tokens before its first row, which are in the cache.
    firsts : int32 [r]
        Its first row of `depths` and `masks`, or CAUSAL.
    depths : int32 [n]
        Depth of each row of a tree, the root 0; its position is context + depth.
    masks : int32 [n, w], w = ceil(max(sizes of trees) / 32)
        Bit j % 32 of word j // 32: the row sees row j of its tree (itself or an ancestor).
    max_size, max_context : int
        No request has more; known without asking the device.
    """

    rows: Tensor
    starts: Tensor
    sizes: Tensor
    contexts: Tensor
    firsts: Tensor
    depths: Tensor
    masks: Tensor
    max_size: int
    max_context: int

    @classmethod
    def build(
        cls,
        trees: TreeBatch,
        device: torch.device | str = "cpu",
        *,
        others: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike] | None = None,
    ) -> PagedBatch:
        """Lay out trees, and `others` without a tree: their rows, starts, sizes and contexts.

        One copy to the device, which nobody waits for.
        """
        tree_sizes = trees.sizes.numpy()
        columns: Sequence[NDArray[np.int32]] = (
            trees.rows.numpy(),
            trees.starts.numpy(),
            tree_sizes,
            trees.contexts.numpy(),
            np.cumsum(tree_sizes, dtype=np.int32) - tree_sizes,
        )
        if others is not None:
            more = [np.asarray(column, np.int32) for column in others]
            more.append(np.full_like(more[0], CAUSAL))
            columns = [np.concatenate(pair) for pair in zip(columns, more, strict=True)]
        max_size, max_context = (int(columns[i].max(initial=0)) for i in (2, 3))
        parts = [*map(torch.from_numpy, columns), trees.depths, trees.masks.flatten()]
        packed = torch.cat(parts)
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory()
        there = packed.to(device, non_blocking=True).split([len(part) for part in parts])
        rows, starts, sizes, contexts, firsts, depths, masks = there
        return cls(
            rows,
            starts,
            sizes,
            contexts,
            firsts,
            depths,
            masks.view(trees.masks.shape),
            max_size,
            max_context,
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def take_over(self, batch: PagedBatch) -> None:
        """Let these buffers, which a CUDA graph was captured over, say what `batch` says.

        Raises
        ------
        ValueError
            It does not fit into them.
        """
        words = self.masks.shape[1]
        if (
            len(batch) > len(self)
            or len(batch.depths) > len(self.depths)
            or batch.masks.shape[1] > words
            or batch.max_size > self.max_size
            or batch.max_context > self.max_context
        ):
            raise ValueError(f"{batch.shape} does not fit into buffers of {self.shape}")
        self.sizes.zero_()
        for field in fields(self):
            mine, new = getattr(self, field.name), getattr(batch, field.name)
            if field.name == "masks":
                mine[: len(new), : new.shape[1]] = new
            elif isinstance(new, Tensor):
                mine[: len(new)] = new

    @property
    def shape(self) -> dict[str, int]:
        """How large it is."""
        return {
            "requests": len(self),
            "nodes": len(self.depths),
            "mask words": self.masks.shape[1],
            "max_size": self.max_size,
            "max_context": self.max_context,
        }


class PagedCall(NamedTuple):
    """What `paged_attention` was given, checked; see there."""

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
