#!/usr/bin/env python3
"""Let hostile clients at a server with lookahead, and see whether anybody else notices."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

EPILOG = """\
Two real servers of a tiny model in float32 are started, one with lookahead and one without. Clients
send wrong types, nested and huge values, lone surrogates, token ids out of range, references at
and over each limit, a new namespace each; they cut connections in every state, read slowly and
abort streams. Cache files that are torn, foreign, links, pipes or another user's are loaded.

Promises, each of which is a violation where it is broken:
  - a bad request gets a status of 400 to 499 and one sentence, in less than 2 KB and 5 s;
  - a good client's tokens are plain vLLM's;
  - memory stays within 2 % over 10 minutes (shorter runs print it);
  - a good client's time per token, p50 and p99, grows by no more than 10 % against the same load
    without lookahead's fields, in turns on the same server; plain vLLM's is printed beside it;
  - what a client brought is released when it leaves;
  - the server ends with status 0 on SIGTERM, without a traceback or a process left.
What plain vLLM does wrong with the same bytes, lookahead's fields under other names, is listed and
not counted.

examples:
  scripts/cpu_env.sh .venv/bin/python scripts/hostile.py --minutes 20
  scripts/cpu_env.sh .venv/bin/python scripts/hostile.py --quick
  scripts/cpu_env.sh .venv/bin/python scripts/hostile.py --minutes 20 --seed 7 --rate 40
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="how long, servers up (default: 20)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of all that is drawn (default: a fresh one, printed)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=20.0,
        help="hostile clients a second while a good one is timed (default: 20)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two minutes, and times decide nothing: the slice that tests/hostile runs",
    )
    parser.add_argument(
        "--logs", type=Path, help="keep the servers' logs in this folder (default: none are kept)"
    )
    args = parser.parse_args()
    if not 0 < args.rate <= 1000:
        parser.error(f"--rate {args.rate} was given, but it must be above 0 and at most 1000")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes} was given, but it must be above 0")
    return args


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with this process
    # Engines are not loaded for --help.
    from tests.hostile.cache_files import load_all
    from tests.hostile.play import Plan, play

    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    plan = Plan(args.minutes, seed, args.rate)
    if args.quick:
        plan = Plan.quick(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.logs or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = play(plan, folder)
        load_all(folder, report)
    print(report.table())
    print(f"seed {seed}: {report.summary()}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
