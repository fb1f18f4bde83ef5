"""Rows of trees as decode rows: for vLLM's kernel of latent attention on a CPU."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.verify.layout.paged_batch import PagedBatch


class DecodeRows(NamedTuple):
    """Rows of trees as requests of their own, for a kernel of decode rows.

    Each row has a new token and a context that ends with its path. The requests share the full
    blocks of the context that they have in common.
    """

    slots: Tensor
    """int64 [blocks * block_size]: the slot of the paged cache that is copied to each slot."""
    block_table: Tensor
    """int32 [n, b]: the blocks of each request."""
    lengths: Tensor
    """int32 [n]: the tokens of each request, the new one included."""


def decode_rows(batch: PagedBatch, block_table: Tensor, block_size: int) -> DecodeRows:
    """The rows of `batch`, which is as in LatentCall, as `DecodeRows`; both are on the CPU."""
    slots: list[NDArray[np.int64]] = []
    tables: list[list[int]] = []
    lengths: list[int] = []
    num_blocks = 0
    masks = batch.masks.numpy()
    for row, size, context, first in torch.stack(
        (batch.requests, batch.sizes, batch.contexts, batch.firsts), dim=1
    ).tolist():
        positions = np.arange(context + size)
        own = block_table[row].numpy()[positions // block_size].astype(np.int64) * block_size
        own += positions % block_size
        full = context // block_size
        shared = list(range(num_blocks, num_blocks + full))
        slots.append(own[: full * block_size])
        num_blocks += full
        nodes = np.arange(size)
        attended = masks[first : first + size][:, nodes // 32] >> (nodes % 32) & 1
        for path in attended.astype(np.bool_):
            rest = np.concatenate((own[full * block_size : context], own[context:][path]))
            count = -(-len(rest) // block_size)
            slots.append(np.resize(rest, count * block_size))
            tables.append([*shared, *range(num_blocks, num_blocks + count)])
            lengths.append(full * block_size + len(rest))
            num_blocks += count
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for i, table in enumerate(tables):
        padded[i, : len(table)] = table
    return DecodeRows(
        torch.from_numpy(np.concatenate(slots)),
        torch.from_numpy(padded),
        torch.tensor(lengths, dtype=torch.int32),
    )
