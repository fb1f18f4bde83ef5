"""The command line of scripts/hostile.py."""

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Defaults, set before vLLM is imported."""

DESCRIPTION = (
    "Send hostile requests to a server with lookahead, and check that other clients are unaffected."
)
EPILOG = """\
Two real servers of a tiny model in float32 are started, one with lookahead and one without. Clients
send wrong types, nested and huge values, lone surrogates, token ids out of range, references at
and over each limit, tool results of any kind, and a new namespace each; they cut connections in
every state, read slowly and abort streams.

Each of these is required, and a violation if it does not hold:
  - a bad request gets a status of 400 to 499 and one sentence, in less than 2 KB and 5 s;
  - a good client's tokens are plain vLLM's;
  - memory grows by at most 2 % in 10 minutes (shorter runs only print it);
  - a client's resources are released when it leaves;
  - the server ends with status 0 on SIGTERM, without a traceback or a process left.
What plain vLLM does wrong with the same bytes, with lookahead's fields renamed, is listed and not
counted.

examples:
  scripts/cpu_env.sh .venv/bin/python scripts/hostile.py --minutes 20
  scripts/cpu_env.sh .venv/bin/python scripts/hostile.py --minutes 20 --seed 7 --rate 40
"""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--minutes",
        type=float,
        default=20.0,
        help="duration, without the start of the servers (default: 20)",
    )
    add(
        "--seed",
        type=int,
        help="of everything that is drawn (default: a random one, which is printed)",
    )
    add(
        "--rate",
        type=float,
        default=20.0,
        help="hostile clients a second while a good one asks (default: 20)",
    )
    args = parser.parse_args(argv)
    if not 0 < args.rate <= 1000:
        parser.error(f"--rate {args.rate} was given, but it must be above 0 and at most 1000")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes} was given, but it must be above 0")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the plan; 1 if there is a violation."""
    args = parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with this process
    # Engines are not loaded for --help.
    from tests.hostile.play import Plan, play

    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = play(Plan(args.minutes, seed, args.rate), Path(folder))
    print(report.table())
    print(f"seed {seed}: {report.summary()}")
    return 1 if report.violations else 0
