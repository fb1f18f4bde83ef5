"""The draft trees of one forward pass, as tree attention reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.native import TreeBatchView


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The branching draft trees of one forward pass.

    A tree's rows are its root, then its nodes in list order; they are consecutive query tokens.
    Row j's K/V lie in the request's KV slot `context + j`: slot order is list order, not position
    order. Every row attends to the slots 0..context-1 and, in its own tree's block, to `masks`.

    Attributes
    ----------
    rows : int32 [t]
        The request's row in the batch, which is its row of the block table.
    starts : int32 [t]
        Index of the root among the flattened query tokens.
    sizes : int32 [t]
        Nodes + 1.
    contexts : int32 [t]
        Committed tokens before the root: the root's position and its KV slot.
    depths : int32 [n], n = sum(sizes)
        Depth of each row, the root 0. The row's position is context + depth.
    masks : int32 [n, w], w = ceil(max(sizes) / 32)
        Bit j % 32 of word j // 32: the row attends to row j of its tree (itself or an ancestor).
    """

    rows: Tensor
    starts: Tensor
    sizes: Tensor
    contexts: Tensor
    depths: Tensor
    masks: Tensor

    @classmethod
    def build(
        cls,
        trees: Sequence[DraftTree],
        rows: ArrayLike,
        starts: ArrayLike,
        contexts: ArrayLike,
    ) -> TreeBatch:
        """Lay out `trees`, with one entry of `rows`, `starts`, `contexts` for each (on the CPU)."""
        depths: list[np.ndarray] = []
        bits: list[int] = []
        for tree in trees:
            depths += (_ROOT_DEPTH, tree.depths)
            tree_bits = [1]
            for row, parent in enumerate(tree.parents.tolist(), start=1):
                tree_bits.append(tree_bits[parent + 1] | 1 << row)
            bits += tree_bits
        sizes = np.array([len(tree) + 1 for tree in trees], dtype=np.int32)
        words = (int(sizes.max(initial=1)) + 31) // 32
        masks = np.frombuffer(
            bytearray().join([b.to_bytes(4 * words, "little") for b in bits]), dtype="<i4"
        )
        return cls(
            _int32(rows),
            _int32(starts),
            torch.from_numpy(sizes),
            _int32(contexts),
            torch.from_numpy(np.concatenate(depths) if depths else np.empty(0, np.int32)),
            torch.from_numpy(masks.reshape(len(bits), words)),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def ends(self) -> tuple[int, int, int]:
        """How many block table rows, query tokens and KV slots per request the batch reaches."""
        if not len(self):
            return 0, 0, 0
        return (
            int(self.rows.max()) + 1,
            int((self.starts + self.sizes).max()),
            int((self.contexts + self.sizes).max()),
        )

    @cached_property
    def view(self) -> TreeBatchView:
        """The batch for compiled code; valid as long as the batch."""
        fields = (self.rows, self.starts, self.sizes, self.contexts, self.depths, self.masks)
        for tensor in fields:
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.is_cuda:
                raise ValueError("a TreeBatch holds contiguous int32 tensors on the CPU")
        if len({len(f) for f in fields[:4]}) != 1 or len(self.depths) != len(self.masks):
            raise ValueError("the tensors of a TreeBatch differ in length")
        return TreeBatchView(len(self), self.masks.shape[1], *(f.data_ptr() for f in fields))


_ROOT_DEPTH = np.zeros(1, dtype=np.int32)


def _int32(values: ArrayLike) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
