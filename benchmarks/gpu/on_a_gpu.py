"""Run the project's tests and its fuzzer, which are written for a CPU, on a GPU.

    PYTHONPATH=.:benchmarks/gpu python -m pytest -p on_a_gpu tests/engine/test_exactness.py
    PYTHONPATH=. python benchmarks/gpu/on_a_gpu.py scripts/fuzz.py --minutes 2

Importing this module sets environment variables that vLLM reads, and replaces functions of
`tests.support`; no file is changed.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENVIRONMENT = {
    # Plain vLLM runs on the model runner that it has on a CPU, so that seeds mean the same.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # By default vLLM's Triton attention rounds float32 to TF32.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def make_llm(**settings: Any) -> Any:
    """`vllm.LLM` without the attention backend that latent attention needs on a CPU."""
    from vllm import LLM

    if settings.get("attention_backend") == "CPU_MLA":
        del settings["attention_backend"]
    return LLM(**settings)


def load_weights(loader: Any, model: Any, model_config: Any) -> None:
    """The weights of `WanderingModelLoader`, drawn on the CPU: there the generator is."""
    import torch

    rng = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        weights = parameter.data
        if weights.ndim > 1:
            mean, width = 0.0, (0.1 if "embed" in name else 3) * weights.shape[-1] ** -0.5
        elif name.endswith("sinks"):
            mean, width = 10.0, 5.0
        elif name.endswith("weight"):
            mean, width = 1.0, 0.1
        else:
            mean, width = 0.0, 0.1
        drawn = torch.empty(weights.shape, dtype=weights.dtype)
        weights.copy_(drawn.normal_(mean, width, generator=rng))


@contextmanager
def perturbed_logits(seed: int, size: float | None = None) -> Iterator[None]:
    """As `tests.fuzz.play.perturbed_logits`, with noise that is drawn on the CPU."""
    import torch

    play = importlib.import_module("tests.fuzz.play")
    rng = torch.Generator().manual_seed(seed)
    size = play.LAST_BITS if size is None else size

    def with_noise(sample: Any) -> Any:
        def perturbed(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            largest = logits.nan_to_num(0, 0, 0).abs().amax(dim=-1, keepdim=True)
            noise = (2 * torch.rand(logits.shape, generator=rng) - 1).to(logits.device)
            return sample(self, logits + noise * size * largest, *args, **kwargs)

        return perturbed

    first, second = play.Sampler.forward, play.SecondSampler.__call__
    play.Sampler.forward, play.SecondSampler.__call__ = with_noise(first), with_noise(second)
    try:
        yield
    finally:
        play.Sampler.forward, play.SecondSampler.__call__ = first, second


def prepare_tests() -> None:
    """What both pytest and the fuzzer need."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    importlib.import_module("tests.support.driving").LLM = make_llm  # type: ignore[attr-defined]
    importlib.import_module("tests.support.models").WanderingModelLoader.load_weights = load_weights


def prepare_fuzzer() -> None:
    """What only the fuzzer needs."""
    play = importlib.import_module("tests.fuzz.play")
    play.perturbed_logits = perturbed_logits  # type: ignore[attr-defined]


prepare_tests()

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    prepare_fuzzer()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
