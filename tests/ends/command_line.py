"""The command line of scripts/check_ends.py."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.ends.ending import Ending, endings

DESCRIPTION = "End engines in many ways, repeatedly, and check that their cache files were saved."
EPILOG = """\
Each run starts an engine of a tiny model, whose cache file is saved only at the end and has the 64
MB of the default `max_nodes`. The engine answers a request and is ended. Once all processes are
gone, the file must be complete and contain the n-grams of the answer.

Containers are PID namespaces; leave them out with --only if you may not create one. Processes are
forked from this one, which has imported vLLM, so that a start takes only seconds.

examples:
  scripts/cpu_env.sh .venv/bin/python scripts/check_ends.py --times 20
  scripts/cpu_env.sh .venv/bin/python scripts/check_ends.py --only offline inline --times 5
"""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--times", type=int, default=20, help="runs of each way to end (default: 20)")
    add("--only", nargs="*", default=[], help="parts of the names of ways")
    add("--slow", type=float, default=0, help="seconds that a save takes longer")
    add(
        "--runner",
        choices=("v1", "v2"),
        default="v1",
        help="vLLM's model runner (default: v1); v2 has stand-ins for its kernels",
    )
    add("--list", action="store_true", help="print the names of ways")
    add("--run", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def slow_down_saves(seconds: float) -> None:
    """Make each `os.fsync` of this process and its children take longer."""
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        time.sleep(seconds)
        sync(descriptor)

    os.fsync = slow_sync


def check(chosen: Sequence[Ending], times: int) -> None:
    """Run each way to end `times` times, and print a line with its results."""
    from tests.ends import engine
    from tests.ends.watch import watch
    from tests.support.models import save_tiny_model
    from tests.support.servers import free_port
    from tests.support.tokenizer import save_tokenizer

    temporary = Path(tempfile.mkdtemp())
    model = save_tokenizer(save_tiny_model("llama", temporary))
    for ending in chosen:
        results: Counter[str] = Counter()
        longest = 0.0
        for _ in range(times):
            folder = Path(tempfile.mkdtemp(dir=temporary))
            cache, log, port = folder / "a.cache", folder / "log", free_port()
            sys.stdout.flush()
            if not (pid := os.fork()):
                engine.run(ending, model, cache, log, port)
                sys.exit()  # as a script ends
            result, seconds = watch(ending, pid, cache, log, port)
            results[result] += 1
            longest = max(longest, seconds)
            if result == "saved":
                shutil.rmtree(folder)
        counts = "; ".join(f"{count} x {result}" for result, count in results.items())
        print(f"{ending!s:22} {counts}; ended in {longest:.1f} s at most", flush=True)
    if any(temporary.glob("*/log")):
        print(f"the logs of engines that lost their cache file: {temporary}/*/log")
    else:
        shutil.rmtree(temporary)


def main(argv: Sequence[str]) -> int:
    """Check the chosen ways; with --run, be the process with the engine."""
    args = parse_args(argv)
    chosen = [e for e in endings() if not args.only or any(part in str(e) for part in args.only)]
    if args.list:
        print("\n".join(map(str, chosen)))
        return 0
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")
    # vLLM is imported from here on.
    from lookahead_vllm.draft.options import LookaheadOptions
    from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
    from tests.ends import engine
    from tests.support import v2_on_cpu

    if args.runner == "v2":
        v2_on_cpu.enable()
    if args.slow:
        slow_down_saves(args.slow)
    NGramTrieProposer(LookaheadOptions(max_nodes=4096))  # loads the kernels
    if args.run:
        fields, *paths, port = json.loads(args.run)
        engine.run(Ending(*fields), *map(Path, paths), port)
    else:
        check(chosen, args.times)
    return 0
