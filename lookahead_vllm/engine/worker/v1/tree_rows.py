"""What the attention backends of all devices do to a step with branching trees."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


def without_contexts(
    metadata: CommonAttentionMetadata, rows: torch.Tensor, sizes: torch.Tensor
) -> CommonAttentionMetadata:
    """The step as vLLM's own kernel is told of it, which still runs over the whole batch.

    Told that a tree's request, int32 [t] `rows` with so many tokens each, has no context, it spends
    next to nothing on rows that tree attention overwrites.
    """
    seq_lens = metadata.seq_lens.clone()
    seq_lens[rows.long()] = sizes.to(seq_lens.dtype)
    return replace(metadata, seq_lens=seq_lens)
