"""Latent attention (MLA) of draft trees over vLLM's paged cache of latents.

Queries are in the space of the latents: each head's has been multiplied by its part of W_UK (weight
absorption, DeepSeek-V2, section 2.1.2). So all heads share one key, the latent and its rotary part,
and one value, the latent. Implemented in Triton, and in plain PyTorch as the reference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lookahead_vllm.verify.attention import FP8_DTYPES, QUERY_DTYPES
from lookahead_vllm.verify.devices import Impl, module_for
from lookahead_vllm.verify.layout.paged_batch import PagedBatch


class LatentCall(NamedTuple):
    """The arguments of `latent_attention`."""

    query: Tensor
    """float32, bfloat16 or float16 [n, heads, rank + rotary]: only the rows of the trees, one tree
    after the other; n = sum(sizes)."""
    cache: Tensor
    """[num_blocks, block_size, rank + rotary], contiguous in the last dimension. The query's dtype,
    or fp8 with `cache_scale`."""
    output: Tensor
    """[n, heads, rank] of the query's dtype; written in place."""
    block_table: Tensor
    """int32 [num_reqs, max_blocks], as in PagedCall."""
    batch: PagedBatch
    """Only trees, on the query's device. `starts` and `tokens` are not read."""
    scale: float
    """Factor of q . k."""
    cache_scale: Tensor | None = None
    """float32 [1]: factor of an fp8 cache's latents."""


def latent_attention(call: LatentCall, impl: Impl = "auto") -> None:
    """Write the attention of the rows of trees to `call.output`.

    The latents of all rows must already be in the cache. A slot that no row attends to has no
    effect, NaN and inf included.
    """
    _check(call)
    if not len(call.batch) or not call.batch.max_size:
        return
    module_for("latent", call.query.device, impl).attend(call)


def _check(call: LatentCall) -> None:
    query, cache, output, block_table = call[:4]
    rows, heads, width = query.shape
    is_fp8 = cache.dtype in FP8_DTYPES
    assert query.dtype in QUERY_DTYPES and output.dtype == query.dtype, (query.dtype, output.dtype)
    assert is_fp8 or cache.dtype == query.dtype, (cache.dtype, query.dtype)
    assert is_fp8 == (call.cache_scale is not None)
    assert cache.ndim == 3 and cache.shape[2] == width, cache.shape
    assert output.shape[:2] == (rows, heads) and 0 < output.shape[2] <= width, output.shape
    assert all(tensor.stride(-1) == 1 for tensor in call[:4])
    assert block_table.dtype == torch.int32
