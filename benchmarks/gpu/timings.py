"""Milliseconds a call of tree attention, beside FlashAttention on a chain of as many tokens."""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import triton.testing

from benchmarks.gpu.case import DEVICE, Case
from benchmarks.gpu.processes import TIME_IS_UP, Limit, in_processes

KV_HEADS = 8
MEMORY_SHARE = 0.4
"""K/V may take so much of the GPU's memory; larger cases are left out."""
COPY_BYTES = 1 << 30
TIMES = ("flash", "triton", "xformers", "reference")
MAX_SPLITS = 32
"""vLLM's bound in CUDA graphs, `flash_attn_max_num_splits_for_cuda_graph`."""


def flash_attention(case: Case) -> tuple[str, Callable[[], Any]]:
    """The best FlashAttention installed: its name, and a function that runs it on chains."""
    starts = torch.tensor([*case.starts, len(case.query)], dtype=torch.int32, device=DEVICE)
    lengths = case.batch.contexts + case.batch.sizes
    longest = int(lengths.max())
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        version = get_flash_attn_version(head_size=case.head_size) or 2
        schedule = {}
        if version == 3:  # vLLM makes it once a step, for all layers
            schedule = {
                "num_splits": MAX_SPLITS,
                "scheduler_metadata": get_scheduler_metadata(
                    batch_size=len(case.sizes), max_seqlen_q=max(case.sizes), max_seqlen_k=longest,
                    num_heads_q=case.heads, num_heads_kv=case.kv_heads, headdim=case.head_size,
                    cache_seqlens=lengths, qkv_dtype=case.dtype, cu_seqlens_q=starts,
                    page_size=case.page_size, causal=True, num_splits=MAX_SPLITS,
                ),
            }  # fmt: skip
        return f"vLLM's {version}", lambda: flash_attn_varlen_func(
            case.query, case.key_cache, case.value_cache, out=case.output, cu_seqlens_q=starts,
            max_seqlen_q=max(case.sizes), seqused_k=lengths, max_seqlen_k=longest,
            softmax_scale=case.call.scale, causal=True, block_table=case.block_table,
            fa_version=version, **schedule,
        )  # fmt: skip
    except ImportError:
        return "torch flash", _torch_flash(case, longest)


def _torch_flash(case: Case, longest: int) -> Callable[[], Any]:
    """torch's own, over random K/V without pages."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    count, size = len(case.sizes), case.sizes[0]
    q = case.query.view(count, size, case.heads, case.head_size)
    shape = (count, case.kv_heads, longest, case.head_size)
    k, v = (torch.randn(shape, device=DEVICE, dtype=case.dtype) for _ in range(2))

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            mask = causal_lower_right(size, longest)
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True
            )

    return run


@cache
def copy_bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (triton.testing.do_bench(lambda: target.copy_(source)) * 1e-3)


def milliseconds(run: Callable[[], Any], graph: bool = True) -> float | None:
    """The median of a call, replayed from a CUDA graph if `graph`; None where it fails.

    RuntimeError if the device has failed, so that nothing else can be measured here.
    """
    try:
        if graph:
            return float(triton.testing.do_bench_cudagraph(run, return_mode="median"))
        return float(triton.testing.do_bench(run, return_mode="median"))
    except (ValueError, RuntimeError, NotImplementedError) as reason:
        torch.cuda.synchronize()
        print(f"  left out: {str(reason).splitlines()[0]}", file=sys.stderr)
        return None


def time_case(shape: tuple[int, int, int]) -> dict[str, Any]:
    """The times of requests, of this context and as many nodes each."""
    requests, context, nodes = shape
    case = Case([context] * requests, [nodes] * requests, heads=32, kv_heads=KV_HEADS)
    bandwidth = copy_bandwidth()
    flash_name, flash = flash_attention(case)
    row = {
        "bandwidth": bandwidth,
        "floor": requests * kv_bytes(context, nodes) / bandwidth * 1e3,
        "flash_by": flash_name,
        **dict.fromkeys(TIMES),
    }
    calls: dict[str, Callable[[], Any]] = {"flash": flash}
    calls |= {name: partial(case.run, name) for name in TIMES[1:]}
    try:
        for name, call in calls.items():
            is_slow = name == "reference"
            if (name == "xformers" and not find_spec(name)) or (is_slow and requests > 1):
                continue
            row[name] = milliseconds(call, graph=not is_slow)
    except RuntimeError as reason:
        row["raised"] = str(reason)
    return row


def kv_bytes(context: int, nodes: int) -> int:
    """The K/V of a request."""
    return (context + nodes + 1) * 4 * KV_HEADS * Case.head_size


def measure(
    options: argparse.Namespace, results: dict[str, Any], save: Callable[[], None], limit: Limit
) -> None:
    """Print the times of all implementations, side by side.

    `results` gets the rows, and `save` is called after each.
    """
    head = ["requests", "context", "nodes", "floor", "flash", "triton", "/flash", "xformers"]
    print("\n" + " | ".join(name.rjust(9) for name in [*head, "reference"]))
    rows = results["timings"] = []
    most_bytes = MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
    shapes = [
        (requests, context, nodes)
        for requests, context, nodes in itertools.product(
            options.requests, options.contexts, options.nodes
        )
        if requests * kv_bytes(context, nodes) <= most_bytes
    ]
    for shape, found in in_processes(time_case, shapes, 1, limit.left):
        row = dict(zip(("requests", "context", "nodes"), shape, strict=True), **found)
        rows.append(row)
        save()
        failed = [str(row[key]) for key in ("raised", "stopped") if key in row]
        print(" | ".join(cell.rjust(9) for cell in _cells(row)), *failed, flush=True)
    if len(rows) < len(shapes):
        print(f"{len(shapes) - len(rows)} not begun: {TIME_IS_UP}")
    if rows and "flash_by" in rows[0]:
        print(f"\nmilliseconds a call; flash is {rows[0]['flash_by']}")
        print(f"a copy moves {rows[0]['bandwidth'] / 1e12:.2f} TB/s")


def _cells(row: dict[str, Any]) -> list[str]:
    floor, flash, trees, *others = map(row.get, ("floor", *TIMES))
    times = (floor, flash, trees, trees / flash if trees and flash else None, *others)
    return [
        *(str(row[key]) for key in ("requests", "context", "nodes")),
        *("-" if value is None else f"{value:.3f}" for value in times),
    ]
