"""Check lookahead's GPU attention on this machine: is it right, and how fast is it?"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

try:
    import torch
    import triton.testing

    from lookahead_vllm.cli.arguments import check_outputs, positive, positives
    from lookahead_vllm.verify.gpu.paged_attention import paged_attention, reference_attention
    from lookahead_vllm.verify.gpu.paged_batch import CAUSAL, PagedBatch, PagedCall
except ImportError as error:
    sys.exit(f"gpu_check.py needs torch, triton and numpy, and nothing else: {error}")

EPILOG = """\
Three parts, each of which can be left out:

  kernels   every implementation against attention by the book in float64, over a grid of dtypes,
            head sizes, trees, contexts, cache layouts and options; unused slots hold NaN
  timings   milliseconds a call, one layer, replayed from a CUDA graph: FlashAttention on a chain of
            as many tokens, then trees with triton, xformers and torch; `floor` is the time that
            reading the K/V once takes at the bandwidth that a copy reaches here
  bench     scripts/bench.py with the model that --model names, where vLLM with CUDA is installed

FlashAttention is vLLM's or the package flash-attn, over the same pages; where neither is there,
torch's own over K/V without pages, which is named `torch flash` in the table.

It runs with torch, triton and numpy alone. One table goes to the terminal, everything to --json,
and pictures to --plot, where matplotlib is installed.

examples:
  python scripts/gpu_check.py --json gpu.json --plot gpu.png
  python scripts/gpu_check.py --only kernels
  python scripts/gpu_check.py --only timings --contexts 1024,8192 --nodes 16,128 --requests 1
"""

ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""How far from float64 a row may be, relative to its length."""
PARTS = ("kernels", "timings", "bench")
DEVICE = "cuda"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=PARTS, action="append", help="this part alone; repeatable")
    add("--contexts", type=positives, default=[256, 1024, 4096, 8192, 32768], metavar="N,M")
    add("--requests", type=positives, default=[1, 8, 64], metavar="N,M")
    add("--nodes", type=positives, default=[1, 16, 32, 64, 128], metavar="N,M")
    add("--heads", type=positive, default=32, help="query heads (default: 32)")
    add("--kv-heads", type=positive, default=8, help="KV heads (default: 8)")
    add("--head-size", type=positive, default=128, help="default: 128")
    add("--page-size", type=positive, default=16, help="tokens of a page (default: 16)")
    add("--dtype", default="bfloat16", choices=("float16", "bfloat16"), help="of the timings")
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add("--plot", type=Path, metavar="OUT.png", help="draw the timings there")
    add("--model", help="a model's folder or name, for `bench`")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="prompts, for `bench`")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device here; without one, the kernels are tested under Triton's "
            "interpreter: python -m pytest tests/verify/gpu/test_paged_attention.py"
        )
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    try:
        check_outputs(options, ValueError)
    except ValueError as error:
        parser.error(str(error))
    return options


def tree_parents(nodes: int, rng: random.Random) -> list[int]:
    """Each node hangs from one of the eight before it, or from the root, -1."""
    return [rng.randrange(max(-1, i - 8), i) if i else -1 for i in range(nodes)]


def depths_and_masks(parents: Sequence[int], words: int) -> tuple[list[int], list[list[int]]]:
    """Of a tree's rows, the root first; see `PagedBatch`."""
    depths, sees = [0], [1]
    for place, parent in enumerate(parents):
        depths.append(depths[parent + 1] + 1)
        sees.append(sees[parent + 1] | 1 << (place + 1))
    masks = [[_signed(row >> 32 * word & 0xFFFFFFFF) for word in range(words)] for row in sees]
    return depths, masks


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@dataclass
class Case:
    """Requests, their K/V in pages, and what attention over them needs; on the GPU."""

    contexts: Sequence[int]
    nodes: Sequence[int]
    """Of each request's draft, without the root."""
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: Sequence[int] = ()
    """Requests that have a chain or a prompt, and no mask."""
    heads_first: bool = False
    fp8: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """`sliding_window` and so on; of `alibi_slopes` and `sinks`, whether there are any."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        rng = random.Random(0)
        sizes = [n + 1 for n in self.nodes]
        count, tokens = len(sizes), sum(sizes)
        trees = [i for i in range(count) if i not in self.causal]
        words = (max((sizes[i] for i in trees), default=1) + 31) // 32
        depths: list[int] = []
        masks: list[list[int]] = []
        firsts = []
        for i, nodes in enumerate(self.nodes):
            firsts.append(CAUSAL if i in self.causal else len(depths))
            if i not in self.causal:
                own_depths, own_masks = depths_and_masks(tree_parents(nodes, rng), words)
                depths += own_depths
                masks += own_masks
        self.starts = [sum(sizes[:i]) for i in range(count)]
        self.sizes = sizes

        def ints(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        self.batch = PagedBatch(
            ints(range(count)), ints(self.starts), ints(sizes), ints(self.contexts), ints(firsts),
            ints(depths), ints(masks).view(-1, words), max(sizes), max(self.contexts),
        )  # fmt: skip
        pages = max(c + s for c, s in zip(self.contexts, sizes, strict=True)) // self.page_size + 1
        self.block_table = torch.randperm(count * pages, device=DEVICE).int().view(count, pages)
        shape = (count * pages, self.page_size, self.kv_heads, 2 * self.head_size)
        if self.heads_first:
            shape = (shape[0], shape[2], shape[1], shape[3])
        whole = torch.full(shape, math.nan, device=DEVICE, dtype=self.dtype)
        if self.fp8:
            whole = whole.to(torch.float8_e4m3fn)
        if self.heads_first:
            whole = whole.transpose(1, 2)
        self.cache = whole
        self.key_cache, self.value_cache = whole.split(self.head_size, dim=-1)
        for row, (context, size) in enumerate(zip(self.contexts, sizes, strict=True)):
            slots = torch.arange(context + size, device=DEVICE)
            place = self.block_table[row, slots // self.page_size].long(), slots % self.page_size
            values = torch.randn(len(slots), self.kv_heads, 2 * self.head_size, device=DEVICE)
            whole[place] = values.to(whole.dtype)
        self.query = torch.randn(
            tokens, self.heads, self.head_size, device=DEVICE, dtype=self.dtype
        )
        self.output = torch.full_like(self.query, math.nan)
        each = torch.linspace(0.01, 1, self.heads, device=DEVICE)
        one = torch.ones(1, device=DEVICE) if self.fp8 else None
        self.call = PagedCall(
            self.query, self.key_cache, self.value_cache, self.output, self.block_table, self.batch,
            scale=self.head_size**-0.5,
            sliding_window=self.options.get("sliding_window", -1),
            alibi_slopes=each if self.options.get("alibi_slopes") else None,
            logits_soft_cap=self.options.get("logits_soft_cap", 0.0),
            sinks=each if self.options.get("sinks") else None,
            k_scale=one,
            v_scale=one,
        )  # fmt: skip

    def run(self, impl: str) -> None:
        paged_attention(**self.call._asdict(), impl=impl)  # type: ignore[arg-type]

    def error(self, impl: str) -> float:
        """The largest distance of a row from float64, relative to its length."""
        self.output.fill_(math.nan)
        self.run(impl)
        worst = 0.0
        for start, expected in reference_attention(self.call, torch.float64):
            got = self.output[start : start + len(expected)].double()
            distance = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
            worst = max(worst, math.inf if math.isnan(distance) else distance)
        return worst


def kernel_cases() -> Iterator[tuple[str, Case]]:
    """What the kernels are checked on."""
    for dtype, head_size in itertools.product(ERROR, (64, 80, 96, 128, 192, 256)):
        name = f"{str(dtype).removeprefix('torch.')}, head size {head_size}"
        for heads_first in (False, True):
            order = "heads first" if heads_first else "tokens first"
            yield (
                f"{name}, {order}",
                Case(
                    [0, 1, 700, 3000, 16], [16, 128, 0, 33, 200], head_size=head_size,
                    dtype=dtype, causal=(4,), heads_first=heads_first,
                ),
            )  # fmt: skip
    for heads, kv_heads in ((8, 8), (7, 1), (32, 4), (71, 1)):
        name = f"{heads} heads, {kv_heads} KV heads"
        yield name, Case([513, 40], [60, 5], heads=heads, kv_heads=kv_heads)
    for options in (
        {"sliding_window": 100},
        {"logits_soft_cap": 20.0},
        {"alibi_slopes": True},
        {"sinks": True},
        {"sliding_window": 40, "logits_soft_cap": 5.0, "alibi_slopes": True, "sinks": True},
    ):
        for contexts in ([500, 30, 2], [20_000, 3, 7]):
            name = ", ".join(options) + f", contexts of {contexts[0]}"
            yield name, Case(contexts, [40, 7, 90], options=options, causal=(2,))
    if torch.cuda.get_device_capability() >= (8, 9):
        yield "fp8 cache", Case([900, 5], [30, 60], fp8=True, causal=(1,))
    yield "64 requests", Case(list(range(10, 2000, 31))[:64], [i % 40 for i in range(64)])


def check_kernels(results: dict[str, Any]) -> bool:
    """Compare triton and xformers with float64; whether all is well."""
    rows: list[dict[str, Any]] = []
    failed = 0
    for name, case in kernel_cases():
        for impl in ("torch", "triton", "xformers"):
            try:
                error = case.error(impl)
            except ValueError as reason:  # what xformers cannot do
                rows.append({"case": name, "impl": impl, "left_out": str(reason)})
                continue
            bound = ERROR[case.dtype] * (4 if case.fp8 else 1)
            rows.append({"case": name, "impl": impl, "error": error, "bound": bound})
            if not error < bound:
                failed += 1
                print(f"WRONG: {impl}, {name}: {error:.2e}, where {bound:.0e} is allowed")
    results["kernels"] = rows
    done = [row for row in rows if "error" in row]
    for impl in ("torch", "triton", "xformers"):
        own = [row for row in done if row["impl"] == impl]
        worst = max((row["error"] / row["bound"] for row in own), default=math.nan)
        left_out = sum(row["impl"] == impl for row in rows) - len(own)
        print(
            f"{impl}: {len(own)} cases right to within {worst:.2f} of what is allowed, "
            f"{left_out} left out"
        )
    return not failed


def flash_attention(case: Case) -> tuple[str, Callable[[], Any]]:
    """FlashAttention over the same tokens as chains, by the best that is installed."""
    starts = torch.tensor([*case.starts, len(case.query)], dtype=torch.int32, device=DEVICE)
    lengths = case.batch.contexts + case.batch.sizes
    longest = int(lengths.max())
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        return "vLLM's", lambda: flash_attn_varlen_func(
            case.query, case.key_cache, case.value_cache, out=case.output, cu_seqlens_q=starts,
            max_seqlen_q=max(case.sizes), seqused_k=lengths, max_seqlen_k=longest,
            softmax_scale=case.call.scale, causal=True, block_table=case.block_table,
        )  # fmt: skip
    except ImportError:
        pass
    count, size = len(case.sizes), case.sizes[0]
    q = case.query.view(count, size, case.heads, case.head_size)
    try:
        from flash_attn import flash_attn_with_kvcache

        return "flash-attn", lambda: flash_attn_with_kvcache(
            q, case.key_cache, case.value_cache, cache_seqlens=lengths,
            block_table=case.block_table, causal=True,
        )  # fmt: skip
    except ImportError:
        pass
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    shape = (count, case.kv_heads, longest, case.head_size)
    k, v = (torch.randn(shape, device=DEVICE, dtype=case.dtype) for _ in range(2))

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k,
                v,
                attn_mask=causal_lower_right(size, longest),
                enable_gqa=True,
            )

    return "torch flash", run


def bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (triton.testing.do_bench(lambda: target.copy_(source)) * 1e-3)


def milliseconds(run: Callable[[], Any], graph: bool = True) -> float | None:
    """The median of a call; None where it cannot be done."""
    try:
        if graph:
            return float(triton.testing.do_bench_cudagraph(run, return_mode="median"))
        return float(triton.testing.do_bench(run, return_mode="median"))
    except (ValueError, RuntimeError, NotImplementedError) as reason:
        print(f"  left out: {str(reason).splitlines()[0]}", file=sys.stderr)
        return None


def measure(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Times of all implementations, side by side."""
    speed = bandwidth()
    results["bandwidth"] = speed
    print(f"\na copy moves {speed / 1e12:.2f} TB/s\n")
    head = ["requests", "context", "nodes"]
    head += ["floor", "flash", "triton", "/flash", "xformers", "torch"]
    print(" | ".join(name.rjust(8) for name in head))
    rows = results["timings"] = []
    for requests, context, nodes in itertools.product(
        options.requests, options.contexts, options.nodes
    ):
        size = 2 * options.kv_heads * options.head_size * 2
        held = requests * (context + nodes + 1) * size
        if held > 0.4 * torch.cuda.get_device_properties(0).total_memory:
            continue
        case = Case(
            [context] * requests, [nodes] * requests, heads=options.heads,
            kv_heads=options.kv_heads, head_size=options.head_size, page_size=options.page_size,
            dtype=getattr(torch, options.dtype),
        )  # fmt: skip
        by, flash = flash_attention(case)
        row = {
            "requests": requests,
            "context": context,
            "nodes": nodes,
            "floor": held / speed * 1e3,
            "flash": milliseconds(flash),
            "flash_by": by,
            "triton": milliseconds(partial(case.run, "triton")),
            "xformers": milliseconds(partial(case.run, "xformers"), graph=False),
            "torch": milliseconds(partial(case.run, "torch"), graph=False)
            if requests == 1
            else None,
        }
        rows.append(row)
        ratio = row["triton"] / row["flash"] if row["triton"] and row["flash"] else None
        cells = [requests, context, nodes]
        cells += [
            "-" if value is None else f"{value:.3f}"
            for value in (row["floor"], row["flash"], row["triton"], ratio, row["xformers"],
                          row["torch"])
        ]  # fmt: skip
        print(" | ".join(str(cell).rjust(8) for cell in cells), flush=True)
    print(f"\nmilliseconds a call; flash is {rows[-1]['flash_by'] if rows else 'nobody'}")


def plot(results: dict[str, Any], path: Path) -> None:
    """Triton's time over FlashAttention's, by context: a panel for each number of requests."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in results["timings"] if row["triton"] and row["flash"]]
    counts = sorted({row["requests"] for row in rows})
    figure, axes = pyplot.subplots(
        1, len(counts), figsize=(4 * len(counts), 3.5), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, count in zip(axes[0], counts, strict=True):
        for nodes in sorted({row["nodes"] for row in rows}):
            own = [row for row in rows if (row["requests"], row["nodes"]) == (count, nodes)]
            ratios = [row["triton"] / row["flash"] for row in own]
            axis.plot([row["context"] for row in own], ratios, "o-", label=f"{nodes} nodes")
        axis.axhline(1.3, color="grey", linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{count} requests")
        axis.set_xlabel("context")
    axes[0][0].set_ylabel("tree over FlashAttention's chain")
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(results["device"])
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def bench(options: argparse.Namespace) -> bool:
    """scripts/bench.py, where it can run."""
    try:
        release = version("vllm")
    except PackageNotFoundError:
        print("\nbench: vLLM is not installed, so it is left out")
        return True
    if "cpu" in release or not (options.model and options.prompts):
        print("\nbench: needs vLLM with CUDA, --model and --prompts, so it is left out")
        return True
    command = [
        *(sys.executable, str(ROOT / "scripts" / "bench.py")),
        *("--model", options.model, "--prompts", str(options.prompts)),
        *("--batch-sizes", "1,8,64", "--limit", "24,96,240", "--turns", "3"),
    ]
    return subprocess.run(command).returncode == 0


def main(argv: Sequence[str]) -> int:
    options = parse_args(argv)
    parts = options.only or PARTS
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "argv": list(argv),
    }
    print(f"{results['device']}, torch {torch.__version__}, triton {triton.__version__}\n")
    well = True
    if "kernels" in parts:
        well = check_kernels(results)
    if "timings" in parts:
        measure(options, results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot and results.get("timings"):
        plot(results, options.plot)
    if "bench" in parts:
        well = bench(options) and well
    return 0 if well else 1
