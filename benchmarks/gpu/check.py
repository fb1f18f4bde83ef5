"""Check lookahead's GPU attention on this machine: is it right, and how fast is it?"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

try:
    import torch
    import triton

    from benchmarks.command_line import check_outputs, positives
    from benchmarks.gpu.accuracy import check_kernels
    from benchmarks.gpu.timings import measure, plot
    from lookahead_vllm.cli.arguments import positive
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

FlashAttention is vLLM's or the package flash-attn, over the same pages; where neither is installed,
torch's own over K/V without pages, which is named `torch flash` in the table.

It runs with torch, triton and numpy alone, and measures xformers where it is installed. One table
goes to the terminal, everything to --json, and pictures to --plot, where matplotlib is installed.

examples:
  python scripts/gpu_check.py --json gpu.json --plot gpu.png
  python scripts/gpu_check.py --only kernels
  python scripts/gpu_check.py --only timings --contexts 1024,8192 --nodes 16,128 --requests 1
"""

PARTS = ("kernels", "timings", "bench")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=PARTS, action="append", help="this part alone; repeatable")
    for name, default, meaning in (
        ("--contexts", [256, 1024, 4096, 8192, 32768], "tokens of context"),
        ("--requests", [1, 8, 64], "requests of a call"),
        ("--nodes", [1, 16, 32, 64, 128], "nodes of each request"),
    ):
        listed = ",".join(map(str, default))
        text = f"{meaning}, for the timings (default: {listed})"
        add(name, type=positives, default=default, metavar="N,M", help=text)
    add("--heads", type=positive, default=32, help="query heads (default: 32)")
    add("--kv-heads", type=positive, default=8, help="KV heads (default: 8)")
    add("--head-size", type=positive, default=128, help="default: 128")
    add("--page-size", type=positive, default=16, help="tokens of a page (default: 16)")
    add(
        "--dtype",
        default="bfloat16",
        choices=("float16", "bfloat16"),
        help="of the timings (default: bfloat16)",
    )
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


def bench(options: argparse.Namespace) -> bool:
    """Run scripts/bench.py; False if it fails, True where it cannot run."""
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
    """Run the chosen parts; 1 if a kernel is wrong or the benchmark fails."""
    options = parse_args(argv)
    parts = options.only or PARTS
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "argv": list(argv),
    }
    print(f"{results['device']}, torch {torch.__version__}, triton {triton.__version__}\n")
    passed = True
    try:
        if "kernels" in parts:
            passed = check_kernels(results)
        if "timings" in parts:
            measure(options, results)
    finally:  # what is known, if a kernel fails
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot and results.get("timings"):
        plot(results, options.plot)
    if "bench" in parts:
        passed = bench(options) and passed
    return 0 if passed else 1
