"""Top tokens of logits on a CPU, by the compiled kernel, or by the reference without one."""

import torch
from torch import Tensor

from lookahead_vllm.verify import native
from lookahead_vllm.verify.choices import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def top_tokens(logits: Tensor, rows: Tensor, k: int) -> Tensor:
    library = native.load() if logits.dtype in _DTYPES else None
    if library is None:
        return reference.top_tokens(logits, rows, k)
    tokens = torch.empty(len(rows), k, dtype=torch.int32)
    library.lookahead_top_choices(
        logits.data_ptr(), logits.element_size(), logits.stride(0), logits.shape[1],
        len(rows), rows.contiguous().data_ptr(), k, torch.get_num_threads(), tokens.data_ptr(),
    )  # fmt: skip
    return tokens
