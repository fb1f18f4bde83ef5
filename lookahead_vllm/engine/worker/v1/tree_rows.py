"""Metadata for vLLM's own kernels in steps with branching trees, on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


def without_contexts(
    metadata: CommonAttentionMetadata, rows: torch.Tensor, sizes: torch.Tensor
) -> CommonAttentionMetadata:
    """Metadata in which requests with branching trees have no context.

    vLLM's kernel runs over the whole batch. Without a context it spends little time on the rows
    that tree attention overwrites afterwards.

    Parameters
    ----------
    rows, sizes : int32 [t]
        The rows of the batch with trees, and the tokens of each tree.
    """
    seq_lens = metadata.seq_lens.clone()
    seq_lens[rows.long()] = sizes.to(seq_lens.dtype)
    return replace(metadata, seq_lens=seq_lens)
