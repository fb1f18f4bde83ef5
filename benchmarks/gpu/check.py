"""Check lookahead on this machine's GPU: is it right, and how fast is it?"""

import argparse
import json
import os
import signal
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
    from benchmarks.gpu.processes import Limit
    from benchmarks.gpu.timings import measure
    from lookahead_vllm.cli.arguments import positive
except ImportError as error:
    sys.exit(f"gpu_check.py needs torch, triton and numpy, and nothing else: {error}")

EPILOG = """\
Four parts, each of which can be left out:

  kernels   every implementation of tree attention against attention by the book in float64, over a
            grid of dtypes, head sizes, trees, contexts, cache layouts and options, where unused
            slots hold NaN; and the other kernels against the references of the tests
  exact     engines over small models with made-up weights: in float32, lookahead's answers are
            plain vLLM's, eager and with trees in CUDA graphs; in bfloat16, log-probabilities are as
            exact as plain vLLM's. Where vLLM with CUDA and pytest are installed
  timings   milliseconds a call, one layer of 32 heads of 128 and 8 KV heads in bfloat16, pages of
            16 tokens, replayed from a CUDA graph: FlashAttention on a chain of as many tokens,
            then trees with triton, xformers and plain torch (`reference`); `floor` is the time
            that reading the K/V once takes at the bandwidth that a copy reaches here
  bench     scripts/bench.py with the model that --model names, where vLLM with CUDA is installed;
            what follows `--` goes to it

FlashAttention is vLLM's, over the same pages; where it is not installed, torch's own over K/V
without pages, which is named `torch flash` in the table.

It runs with torch, triton and numpy alone, and takes in what else is installed. One table goes to
the terminal, and everything to --json, after each check; the figures of `bench` go to a file beside
it, OUT.bench.json. --seconds ends it in time: what is under way is stopped, and what is known by
then is reported. A kernel that fails on the device, as by an illegal access, ends its process, and
the others run in a new one; after a test that does, no other is run.

The exit status is 0 if all that was asked for ran and is right, 1 if not: what --seconds stopped is
not known to be right, nor a part that --only names and that cannot run here. 2 is for wrong
options.

examples:
  python scripts/gpu_check.py --json gpu.json
  python scripts/gpu_check.py --only kernels
  python scripts/gpu_check.py --only timings --contexts 1024,8192 --nodes 16,128 --requests 1
  python scripts/gpu_check.py --only bench --model configs/shapes/llama-8b --prompts FILE.jsonl \\
      -- --methods none,lookahead --target-guided --engine-arg load_format=dummy
"""

PARTS = ("kernels", "exact", "timings", "bench")


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
    add("--seconds", type=positive, metavar="N", help="the most that it may take")
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add("--model", help="a model's folder or name, for `bench`")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="prompts, for `bench`")
    add("more", nargs="*", metavar="-- ...", help="options of scripts/bench.py, for `bench`")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device here; without one, the kernels are tested under Triton's "
            "interpreter: python -m pytest tests/verify/attention/test_paged_attention.py"
        )
    try:
        check_outputs(options, ValueError)
    except ValueError as error:
        parser.error(str(error))
    return options


def missing(*packages: str) -> str | None:
    """What is not installed of vLLM with CUDA and these packages."""
    try:
        if "cpu" in version("vllm"):
            return "vLLM with CUDA"
        for package in packages:
            version(package)
    except PackageNotFoundError as error:
        return str(error.name)
    return None


def exact(options: argparse.Namespace, limit: Limit) -> str:
    """Run the tests of exactness on a GPU."""
    if what := missing("pytest"):
        return f"left out: {what} is not installed"
    folder = str(ROOT / "benchmarks" / "gpu")
    path = os.pathsep.join([str(ROOT), folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    tests = str(ROOT / "tests" / "engine" / "test_on_a_gpu.py")
    pytest = [sys.executable, "-m", "pytest", "-p", "on_a_gpu", "-v", "-s", tests]
    return limit.run(["env", f"PYTHONPATH={path}", *pytest])


def bench(options: argparse.Namespace, limit: Limit) -> str:
    """Run scripts/bench.py."""
    if what := missing():
        return f"left out: {what} is not installed"
    if not (options.model and options.prompts):
        return "left out: it needs --model and --prompts"
    output = ("--json", str(options.json.with_suffix(".bench.json"))) if options.json else ()
    return limit.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "bench.py"), "--one-engine", *output),
            *("--model", options.model, "--prompts", str(options.prompts)),
            *("--batch-sizes", "1,8,32", "--limit", "16,48,128", "--turns", "2", *options.more),
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Run the chosen parts; `--help` explains the exit status."""
    options = parse_args(argv)
    limit = Limit(options.seconds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = options.only or PARTS
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "argv": list(argv),
    }
    print(f"{results['device']}, torch {torch.__version__}, triton {triton.__version__}\n")

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    passed = True
    try:
        if "kernels" in parts:
            passed = check_kernels(results, save, limit.left)
        if "timings" in parts:
            measure(options, results, save, limit)
        for name, run in (("exact", exact), ("bench", bench)):
            if name in parts:
                results[name] = said = run(options, limit)
                print(f"\n{name}: {said}", flush=True)
                is_optional = not options.only and said.startswith("left out")
                passed = passed and (said == "well" or is_optional)
    finally:  # what is known, if something raises
        save()
    return 0 if passed else 1
