"""The model's likeliest tokens at each node: what a lookahead branch and recycling learn from."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.verify.cpu import native

MAX_CHOICES = 16

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)


class Choices(NamedTuple):
    """Of each row of logits."""

    tokens: Int32s
    """int32 [n, k]: the likeliest first."""
    gaps: NDArray[np.float32]
    """float32 [n, k]: how far each one's logit is below the first one's."""


def likeliest(
    logits: Tensor, rows: Int64s, k: int, impl: Literal["auto", "torch", "native"] = "auto"
) -> Choices:
    """The `k` largest of some rows of the logits.

    Parameters
    ----------
    logits : float32, bfloat16 or float16 [m, vocabulary]
        On any device; contiguous in its last dimension.
    rows : int64 [n]
    k : int
        At most MAX_CHOICES, and the vocabulary.
    impl : {"auto", "torch", "native"}
        "auto" takes the compiled kernel where it is available, on CPU tensors.

    Raises
    ------
    ValueError
        Another `k` or `impl`, or "native" where it is not available.
    """
    if not 0 < k <= min(MAX_CHOICES, logits.shape[1]):
        raise ValueError(f"k is {k}; there are 1 to {min(MAX_CHOICES, logits.shape[1])} choices")
    if impl not in ("auto", "torch", "native"):
        raise ValueError(f"impl is {impl!r}; choose 'auto', 'torch' or 'native'")
    wanted = torch.from_numpy(rows).to(logits.device)
    fits = logits.device.type == "cpu" and logits.dtype in _NATIVE
    library = native.load() if impl != "torch" and fits else None
    if library is None:
        if impl == "native":
            raise ValueError("the compiled kernel is not available here; use impl='auto'")
        tokens = logits[wanted].topk(k).indices
    else:
        tokens = torch.empty(len(rows), k, dtype=torch.int32)
        library.lookahead_likeliest(
            logits.data_ptr(),
            logits.element_size(),
            logits.stride(0),
            logits.shape[1],
            len(rows),
            wanted.contiguous().data_ptr(),
            k,
            torch.get_num_threads(),
            tokens.data_ptr(),
        )
    values = logits[wanted[:, None], tokens.long()].float()
    gaps = (values[:, :1] - values).nan_to_num()
    return Choices(tokens.int().cpu().numpy(), gaps.cpu().numpy())
