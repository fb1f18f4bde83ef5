"""The model's top tokens at each node, for the lookahead branch and token recycling."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.verify.devices import Impl, module_for
from lookahead_vllm.verify.transfer import to_device

MAX_CHOICES = 16


class Choices(NamedTuple):
    """The k largest logits of each of n rows."""

    tokens: Int32s
    """int32 [n, k]: token ids, the largest logit first."""
    gaps: NDArray[np.float32]
    """float32 [n, k]: the row's largest logit minus the token's logit."""


def top_choices(
    logits: Tensor, rows: Int64s, k: int, impl: Impl = "auto", wait: bool = True
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
    impl : {"auto", "cpu", "reference"}
    wait : bool
        False: return at once; the device fills the arrays later, in stream order.
    """
    assert 0 < k <= min(MAX_CHOICES, logits.shape[1]), k
    selected = to_device(rows, logits.device)
    tokens = module_for("choices", logits.device, impl).top_tokens(logits, selected, k)
    values = logits[selected[:, None], tokens.long()].float()
    gaps = (values[:, :1] - values).nan_to_num()
    on_host = (t.to("cpu", non_blocking=not wait).numpy() for t in (tokens.int(), gaps))
    return Choices(*on_host)
