"""The model's top tokens at each node, for the lookahead branch and token recycling."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s

_PART = 128
"""Logits of which only the maximum is compared at first."""


class Choices(NamedTuple):
    """The k largest logits of each of n rows."""

    tokens: Int32s
    """int32 [n, k]: token ids, the largest logit first."""
    gaps: NDArray[np.float32]
    """float32 [n, k]: the row's largest logit minus the token's logit."""

    @classmethod
    def on_host(cls, packed: Tensor, wait: bool = True) -> Choices:
        """Copy what `pack_choices` returned, int32 [2, n, k].

        Without `wait`, the arrays are filled later, in the order of the device's stream.
        """
        tokens, bits = packed.to("cpu", non_blocking=not wait, copy=True).numpy()
        return cls(tokens, bits.view(np.float32))


def pack_choices(logits: Tensor, k: int) -> Tensor:
    """The tokens with the `k` largest logits in each row, equal logits in any order.

    Launches only, so that a graph may capture it.

    Parameters
    ----------
    logits : float [m, vocabulary]
        On any device.
    k : int
        At most the size of the vocabulary.

    Returns
    -------
    Tensor, int32 [2, m, k]
        `tokens`, and the bits of `gaps`, as in Choices.
    """
    tokens, values = _largest(logits, k)
    values = values.float()
    gaps = (values[:, :1] - values).nan_to_num()
    return torch.stack((tokens.int(), gaps.view(torch.int32)))


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tokens, int64 [m, k], and their logits.

    They are in the k parts of the vocabulary with the largest maxima, or behind its last whole
    part. `topk` of whole rows takes two to twenty times as long on a CPU.
    """
    vocab = logits.shape[1]
    num_parts = vocab // _PART
    whole = num_parts * _PART
    maxima = logits[:, :whole].unflatten(1, (num_parts, _PART)).amax(2)
    parts = maxima.topk(min(k, num_parts)).indices
    places = torch.arange(_PART, device=logits.device)
    tokens = torch.add(places, parts[:, :, None], alpha=_PART).flatten(1)
    rest = places[: vocab - whole] + whole
    tokens = torch.cat([tokens, rest.expand(len(logits), -1)], 1)
    values, best = logits.gather(1, tokens).topk(k)
    return tokens.gather(1, best), values
