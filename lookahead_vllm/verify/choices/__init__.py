"""The model's top tokens at each node, for the lookahead branch and token recycling."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.verify import native
from lookahead_vllm.verify.transfer import to_device

MAX_CHOICES = 16

MAX_PIECE_BYTES = 64 << 20
"""The most bytes of logits that are copied at a time, but at least one row. The compiled kernel
copies none."""

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Choices(NamedTuple):
    """The k largest logits of each of n rows."""

    tokens: Int32s
    """int32 [n, k]: token ids, the largest logit first."""
    gaps: NDArray[np.float32]
    """float32 [n, k]: the row's largest logit minus the token's logit."""


def top_choices(
    logits: Tensor,
    rows: Int64s,
    k: int,
    impl: Literal["auto", "torch", "native"] = "auto",
    wait: bool = True,
) -> Choices:
    """The tokens with the `k` largest logits in the given rows.

    Parameters
    ----------
    logits : float32, bfloat16 or float16 [m, vocabulary]
        On any device; contiguous in its last dimension.
    rows : int64 [n]
        Rows of `logits`; a row may occur more than once.
    k : int
        At most MAX_CHOICES and at most the size of the vocabulary.
    impl : {"auto", "torch", "native"}
        "auto" uses the compiled kernel for CPU tensors if it is available.
    wait : bool
        False: return at once; the device fills the arrays later, in stream order.
    """
    assert 0 < k <= min(MAX_CHOICES, logits.shape[1]), k
    selected = to_device(rows, logits.device)
    is_supported = logits.device.type == "cpu" and logits.dtype in _NATIVE_DTYPES
    library = native.load() if impl != "torch" and is_supported else None
    if library is None:
        assert impl != "native", "there is no compiled kernel"
        piece_rows = max(1, MAX_PIECE_BYTES // (logits.shape[1] * logits.element_size()))
        pieces = [logits[piece].topk(k).indices for piece in selected.split(piece_rows)]
        tokens = torch.cat(pieces)
    else:
        tokens = torch.empty(len(rows), k, dtype=torch.int32)
        library.lookahead_top_choices(
            logits.data_ptr(),
            logits.element_size(),
            logits.stride(0),
            logits.shape[1],
            len(rows),
            selected.contiguous().data_ptr(),
            k,
            torch.get_num_threads(),
            tokens.data_ptr(),
        )
    values = logits[selected[:, None], tokens.long()].float()
    gaps = (values[:, :1] - values).nan_to_num()
    on_host = (t.to("cpu", non_blocking=not wait).numpy() for t in (tokens.int(), gaps))
    return Choices(*on_host)
