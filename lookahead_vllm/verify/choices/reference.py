"""Top tokens of logits in plain PyTorch."""

import torch
from torch import Tensor

MAX_PIECE_BYTES = 64 << 20
"""The most bytes of logits that are copied at a time, but at least one row."""


def top_tokens(logits: Tensor, rows: Tensor, k: int) -> Tensor:
    piece_rows = max(1, MAX_PIECE_BYTES // (logits.shape[1] * logits.element_size()))
    return torch.cat([logits[piece].topk(k).indices for piece in rows.split(piece_rows)])
