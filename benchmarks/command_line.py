"""Command-line options and signal handling that several benchmarks share."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.cores import share_out
from benchmarks.engines.fresh_engine import cpu_runtime, is_cpu_build
from benchmarks.methods import KNOWN, SpeculativeConfig
from lookahead_vllm.cli.arguments import above_zero, check_output, positive
from lookahead_vllm.machine import CPUS_AT_START

PROMPT_LINES = """\
a line of the prompts:
  {"prompt_token_ids": [1, 9690, ...], "category": "qa"}
  or `prompt` (text) or `messages` (a chat) in place of the ids; the category is optional."""


def positives(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas; duplicates are dropped."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def check_outputs(options: argparse.Namespace, error: type[ValueError]) -> None:
    """Raise `error` if the files of --json and --record cannot be written after the run."""
    for path in (options.json, getattr(options, "record", None)):
        if path:
            check_output(path, error)


def engine_parser(description: str | None, epilog: str, methods: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks of a model.

    `epilog` is the text below them, `methods` are the default ones.
    """
    result = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--model", required=True, metavar="DIR", help="the model's folder, or its name on a hub")
    add("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="see below")
    add("--max-tokens", type=positive, default=128, metavar="N", help="default: 128")
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add("--dtype", default="auto", help="as for vLLM: auto, float32, bfloat16, ...")
    add(
        "--kv-cache-gib",
        type=above_zero,
        metavar="G",
        help="of each engine (default: 1 on CPU, vLLM's choice elsewhere)",
    )
    add(
        "--threads",
        metavar="BIND",
        help="VLLM_CPU_OMP_THREADS_BIND: auto, nobind, or cores as in 0-7 (default: vLLM's, auto)",
    )
    add(
        "--methods",
        default=methods,
        metavar="A,B",
        help=f"any of {', '.join(KNOWN)} (default: {methods})",
    )
    add(
        "--config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="also run this `speculative_config`, as a method of that name (null: plain vLLM); "
        "repeatable",
    )
    return result


def kv_cache_bytes(options: argparse.Namespace) -> int | None:
    """The size that --kv-cache-gib gives; None leaves it to vLLM."""
    gib = options.kv_cache_gib or (1 if is_cpu_build() else None)
    return int(gib * 2**30) if gib else None


def engine_environment(options: argparse.Namespace) -> dict[str, str]:
    """Environment variables to add for every engine."""
    binding = {"VLLM_CPU_OMP_THREADS_BIND": options.threads} if options.threads else {}
    return {**cpu_runtime(os.environ), **binding}


def rank_environment(
    options: argparse.Namespace, config: SpeculativeConfig | None, tensor_parallel: int
) -> dict[str, str]:
    """Environment variables to add for an engine of several ranks: on a CPU, their cores.

    Empty for other engines, and if --threads says how to bind.
    """
    ranks = (config or {}).get("parallel", 1) * tensor_parallel
    if options.threads or ranks == 1:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": share_out(CPUS_AT_START, ranks)}


def interrupted(run: Callable[[], None]) -> bool:
    """Run to the end (False), or until Ctrl-C or SIGTERM (True, after printing a line).

    Works too if the process was started with SIGINT ignored, as with `&` in a script.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        print("\ninterrupted; this is what had finished", file=sys.stderr)
        return True
    return False
