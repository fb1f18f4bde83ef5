"""vLLM's second model runner, its default on GPUs, on a machine without a GPU.

The runner's own kernels run under Triton's interpreter, the model on the CPU. Lookahead runs on the
first runner and must give the same output, for seeded sampling too.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def enable(cheap_noise: bool = False) -> None:
    """Make plain engines of this process use the second runner. Call it before vLLM is imported.

    vLLM's sampling kernel takes 40 ms per row in the interpreter. `cheap_noise` replaces its noise,
    for plain engines and lookahead alike, by a cheaper function of seed, position and token.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # it needs Triton's compiler
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # twice as fast
    store = builder.create_masked_store

    def store_where(ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        mask.data = mask.data.astype(bool)  # vLLM passes integer masks
        return store(ptrs, value, mask, cache_policy)

    builder.create_masked_store = store_where
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import gumbel

    if cheap_noise:
        gumbel.gumbel_sample = _gumbel_sample
    topk_topp_sampler.HAS_TRITON = False  # the interpreter cannot run a loop of that kernel
    from lookahead_vllm.engine import config

    # As for a pipeline, under which lookahead has no second runner.
    config._needs_first_runner = lambda *_: "where the kernels are interpreted"


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
