"""The model's top tokens at each node, for the lookahead branch and token recycling."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.verify.transfer import to_device

_PART = 128
"""Logits of which only the maximum is compared at first."""


class Choices(NamedTuple):
    """The k largest logits of each of n rows."""

    tokens: Int32s
    """int32 [n, k]: token ids, the largest logit first."""
    gaps: NDArray[np.float32]
    """float32 [n, k]: the row's largest logit minus the token's logit."""


def top_choices(logits: Tensor, rows: Int64s, k: int, wait: bool = True) -> Choices:
    """The tokens with the `k` largest logits in the given rows, equal logits in any order.

    Parameters
    ----------
    logits : float [m, vocabulary]
        On any device.
    rows : int64 [n]
        Rows of `logits`; a row may occur more than once.
    k : int
        At most the size of the vocabulary.
    wait : bool
        False: return at once; the device fills the arrays later, in stream order.
    """
    tokens, values = _largest(logits, to_device(rows, logits.device), k)
    values = values.float()
    gaps = (values[:, :1] - values).nan_to_num()
    on_host = (t.to("cpu", non_blocking=not wait).numpy() for t in (tokens.int(), gaps))
    return Choices(*on_host)


def _largest(logits: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tokens, int64 [n, k], and their logits.

    They are in the k parts of the vocabulary with the largest maxima, or behind its last whole
    part. `topk` of whole rows takes two to twenty times as long on a CPU.
    """
    vocab = logits.shape[1]
    num_parts = vocab // _PART
    whole = num_parts * _PART
    maxima = logits[:, :whole].unflatten(1, (num_parts, _PART)).amax(2)[rows]
    parts = maxima.topk(min(k, num_parts)).indices
    ids = _ids(vocab, logits.device)
    tokens = torch.add(ids[:_PART], parts[:, :, None], alpha=_PART).flatten(1)
    tokens = torch.cat([tokens, ids[whole:].expand(len(rows), -1)], 1)
    values, best = logits[rows[:, None], tokens].topk(k)
    return tokens.gather(1, best), values


@cache
def _ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, device=device)
