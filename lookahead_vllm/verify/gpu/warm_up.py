"""Launches without effect, one for each specialisation of a kernel that serving can need.

So no request waits for a compiler. Kernels of recurrent layers are not here: vLLM's warm-up runs
steps with drafts through these layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
from lookahead_vllm.verify.gpu.triton_attention import tile_of
from lookahead_vllm.verify.gpu.triton_moves import PagedKVMover


def attention_batches(
    heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[PagedBatch]:
    """Batches without rows, for `paged_attention`."""
    group, rows = heads // kv_heads, 16
    while rows <= tile_of(1 << 20, dtype, head_size).block_m:
        yield from _empty_batches(max(rows // group, 1), device)
        rows *= 2


def latent_batches(device: torch.device) -> Iterator[PagedBatch]:
    """Batches without rows, for `latent_attention`."""
    yield from _empty_batches(1, device)


def _empty_batches(max_size: int, device: torch.device) -> Iterator[PagedBatch]:
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    for max_context in (0, 1 << 20):  # not split, and split
        yield PagedBatch(
            zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros[None], zeros - 1,
            max_size, max_context,
        )  # fmt: skip


def move_nothing(movers: Iterable[PagedKVMover]) -> None:
    """Move a slot of each cache to itself."""
    for mover in movers:
        first = torch.zeros(1, 1, dtype=torch.int64, device=mover.device)
        mover.move_paths(first, first)
