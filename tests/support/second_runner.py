"""vLLM's second model runner, its default on GPUs, on a machine without one.

Its own kernels run under Triton's interpreter, the model itself on the CPU as ever. Lookahead runs
on the first runner, and has to say what this one says, seeds included.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def bring(own_noise: bool = False) -> None:
    """Let plain engines of this process have it. Comes before anything imports vLLM.

    The kernel that draws takes 40 ms a row; with `own_noise`, both engines' noise is another
    function of seed, position and token.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # it would ask for Triton's compiler
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # half as slow
    store = builder.create_masked_store

    def store_where(ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        mask.data = mask.data.astype(bool)  # vLLM has masks of whole numbers
        return store(ptrs, value, mask, cache_policy)

    builder.create_masked_store = store_where
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import gumbel

    if own_noise:
        gumbel.gumbel_sample = _gumbel_sample
    topk_topp_sampler.HAS_TRITON = False  # that kernel has a loop which the interpreter cannot run


def _gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    **_: Any,
) -> torch.Tensor:
    import torch

    assert not apply_temperature and not is_drafting
    requests = expanded_idx_mapping.long()
    noise = torch.zeros_like(logits, dtype=torch.float32)
    for row, key in enumerate(zip(seed[requests].tolist(), pos.tolist(), strict=True)):
        if temperature[requests[row]]:
            generator = torch.Generator().manual_seed(hash(key))
            noise[row] = -torch.empty(logits.shape[1]).exponential_(generator=generator).log()
    return (logits + noise).argmax(dim=1)
