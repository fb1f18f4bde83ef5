"""The model's likeliest tokens at each node: what a lookahead branch and recycling learn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.kernel import Ints

_PART = 128
"""Logits are searched in parts of so many: the likeliest ones are in the parts of the largest."""


class Choices(NamedTuple):
    """Of each row of logits."""

    tokens: Ints
    """int32 [n, k]: the likeliest first."""
    gaps: NDArray[np.float32]
    """float32 [n, k]: how far each one's logit is below the first one's."""


def likeliest(logits: Tensor, k: int) -> Choices:
    """The `k` largest of each row of logits [n, vocabulary], whatever device they are on.

    On CPU several times as fast as `topk` or `argmax` of whole rows.
    """
    whole = logits.shape[-1] // _PART * _PART
    if whole > k * _PART:
        parts = logits[:, :whole].unflatten(-1, (-1, _PART))
        best = parts.amax(-1).topk(k, sorted=False).indices
        found = parts.gather(1, best[..., None].expand(-1, -1, _PART)).flatten(1)
        places = best[..., None] * _PART + torch.arange(_PART, device=logits.device)
        rest = torch.arange(whole, logits.shape[-1], device=logits.device).expand(len(logits), -1)
        found = torch.cat((found, logits[:, whole:]), dim=1)
        places = torch.cat((places.flatten(1), rest), dim=1)
        values, at = found.topk(k)
        tokens = places.gather(1, at)
    else:
        values, tokens = logits.topk(k)
    values = values.float()
    gaps = (values[:, :1] - values).nan_to_num()
    return Choices(tokens.int().cpu().numpy(), gaps.cpu().numpy())
