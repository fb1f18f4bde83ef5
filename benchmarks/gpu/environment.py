"""Versions, the GPU, and whether each library that vLLM and lookahead need loads and runs.

    python benchmarks/gpu/environment.py

The exit status is 0 if all of them do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "numpy", "numba", "llvmlite", "vllm"),
    *("pydantic", "xgrammar", "accelerate", "matplotlib", "nvidia-nccl-cu13", "numba-cuda"),
)
RUNNERS = ("gpu_worker", "gpu_model_runner", "gpu.model_runner")
LOOKAHEAD = (
    *("plugin", "worker.v2.gpu_worker", "worker.gpu_attention"),
    *("scheduler.scheduler", "scheduler.late_scheduler", "front_end.requests"),
)
MAX_ERROR = 0.05


def torch_on_the_device() -> str:
    import torch

    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    assert torch.isfinite(x @ x).all()
    device = torch.cuda.get_device_properties(0)
    return f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory >> 30} GiB"


def numba_compiles() -> str:
    import numba
    import numpy

    return f"a sum of {numba.njit(lambda a: a.sum())(numpy.arange(10))}"


def vllm_loads() -> str:
    import vllm
    from vllm.platforms import current_platform

    return f"{vllm.__version__}, {type(current_platform).__name__}"


def fused_norm() -> str:
    """vLLM's compiled kernels."""
    import torch

    importlib.import_module("vllm._C_stable_libtorch")
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(256, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    expected = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert (out.float() - expected).abs().max() < MAX_ERROR
    return "right"


def flash_attention_over_pages() -> str:
    """3 queries of 4 heads over 20 tokens of 2 KV heads, in 2 pages of 16."""
    import torch
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q = torch.randn(3, 4, 128, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(4, 16, 2, 256, device="cuda", dtype=torch.bfloat16)
    k, v = cache.split(128, dim=-1)
    starts = torch.tensor([0, 3], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([20], device="cuda", dtype=torch.int32)
    table = torch.tensor([[2, 1]], device="cuda", dtype=torch.int32)
    out = torch.empty_like(q)
    flash_attn_varlen_func(
        q, k, v, out=out, cu_seqlens_q=starts, max_seqlen_q=3, seqused_k=lengths, max_seqlen_k=20,
        softmax_scale=128**-0.5, causal=True, block_table=table, fa_version=3,
    )  # fmt: skip
    keys, values = (t[[2, 1]].flatten(0, 1)[:20].float().repeat_interleave(2, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * 128**-0.5
    causal = torch.arange(20, device="cuda") <= torch.arange(17, 20, device="cuda")[:, None]
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    assert (out.float() - expected).abs().max() < MAX_ERROR
    return f"right; vLLM takes version {get_flash_attn_version(head_size=128)}"


def both_runners() -> str:
    for name in RUNNERS:
        importlib.import_module(f"vllm.v1.worker.{name}")
    return "both load"


def lookahead() -> str:
    compatibility = importlib.import_module("lookahead_vllm.engine.compatibility")
    compatibility.check()
    missing = list(compatibility.problems())
    assert not missing, "; ".join(missing)
    for name in LOOKAHEAD:
        importlib.import_module(f"lookahead_vllm.engine.{name}")
    return "loads; this vLLM has all that it replaces or imports"


def servers() -> str:
    importlib.import_module("vllm.entrypoints.openai.api_server")
    importlib.import_module("vllm.benchmarks.serve")
    return "load"


def suffix_decoding() -> str:
    importlib.import_module("arctic_inference.suffix_decoding")
    return "loads"


CHECKS: dict[str, Callable[[], Any]] = {
    "torch on the device": torch_on_the_device,
    "numba": numba_compiles,
    "vllm": vllm_loads,
    "vllm's kernels: fused norm": fused_norm,
    "vllm's kernels: FlashAttention 3 over pages": flash_attention_over_pages,
    "the runners": both_runners,
    "lookahead": lookahead,
    "the front end of `vllm serve` and `vllm bench`": servers,
    "suffix decoding": suffix_decoding,
}


def passes(name: str, check: Callable[[], Any]) -> bool:
    """Run a check and print its result, or the error and where it was raised."""
    start = time.monotonic()
    try:
        result = check()
    except Exception as error:
        print(f"FAILED  {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        traceback.print_exc(limit=-4)
        return False
    print(f"well    {name}: {result} ({time.monotonic() - start:.1f} s)", flush=True)
    return True


def main() -> int:
    """Print versions and run all checks; 1 if one fails."""
    print(sys.executable, platform.python_version(), platform.release(), platform.libc_ver())
    for package in PACKAGES:
        try:
            print(f"  {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package}: not installed")
    results = [passes(name, check) for name, check in CHECKS.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
