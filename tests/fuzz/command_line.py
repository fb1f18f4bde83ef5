"""The command line of scripts/fuzz.py: random rounds until an answer differs or the time is up."""

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead_vllm.engine.plugin import PLAIN_V2

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    PLAIN_V2: "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    # vLLM's workers leave shared memory to Python's resource tracker, which warns at exit.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
}
"""Defaults, set before vLLM is imported and processes start."""

DESCRIPTION = (
    "Send the same random requests to plain vLLM and lookahead until their answers differ."
)
EPILOG = """\
A round draws a tiny random model in float32, settings of the server, a proposer and 16 to 40
requests. Plain vLLM answers them, then lookahead does, under additional settings that must not
change any text: prompts in chunks, preemption, prefix caching, small blocks, few requests at once.
Token ids, texts, finish reasons and logprobs are compared. The first difference ends the run, with
both answers and the command that repeats its round.

The last bits of float32 sums depend on the shape of a batch. Where two tokens are equally likely up
to these bits, plain vLLM itself gives another answer in another batch. A difference that plain vLLM
shows too, in one of eight other batches or with one of 24 random changes to the last bits of its
logits, is counted as a tie and not as a mismatch.

Over an fp8 KV cache, last bits also decide to which value a key or a value is rounded. A difference
is a tie, too, if plain vLLM shows it once it rounds some of those elements the other way.

On a CPU, plain vLLM runs Model Runner V2, as lookahead does. In one of eight rounds, lookahead's
engine and worker run in other processes, in a pipeline of two stages, or as two replicas, and only
outputs are compared.

Some rounds have streaming sessions of two to four turns, whose answers are compared turn by turn.
Their clients may send the next inputs and the end while a turn runs, change parameters, or leave.
In some rounds, lookahead's engine is paused, or preempts all requests, every few steps.
Where prefixes are cached, more requests go on after the answers to others.

In some rounds with a trie, prompts go on from earlier ones, or branch from them, as turns of a
conversation do, with tool results in another spelling.

A draft with an n-gram that its request cannot know, because only another namespace has it, is a
leak, and so is any draft for a request that turned lookahead off. A leak ends the run, too. Rounds
with sessions are not checked for leaks.

examples:
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 60
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 60 --elsewhere 0.5
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 40 --drafter
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 20 --fleet
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --seed 7 --round 12
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --models deepseek_v2,deepseek_v3,falcon_h1
"""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="duration (default: 5)")
    add(
        "--elsewhere",
        type=float,
        metavar="SHARE",
        default=0.125,
        help="the share of the rounds in which lookahead's engine runs in other processes "
        "(default: 0.125)",
    )
    add(
        "--drafter",
        action="store_true",
        help="in each round, a tiny trained drafter proposes, too",
    )
    add(
        "--fleet",
        action="store_true",
        help="in each round, a second engine drafts from what the first one has shared; needs "
        "redis-server",
    )
    add("--seed", type=int, help="of all rounds (default: a random one, which is printed)")
    add("--round", type=int, help="play this round only")
    add(
        "--models",
        metavar="A,B",
        help="names from tests/support/models.py and hybrid_models.py (default: all)",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.elsewhere <= 1:
        parser.error(f"--elsewhere {args.elsewhere} was given, but a share is between 0 and 1")
    if args.round is not None and args.seed is None:
        parser.error("--round needs the --seed that was printed with it")
    return args


def repeat_command(seed: int, number: int, args: argparse.Namespace) -> str:
    """The command that plays a round again."""
    command = f"scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --seed {seed} --round {number}"
    command += f" --models {args.models}" if args.models else ""
    command += f" --elsewhere {args.elsewhere}"
    command += " --drafter" if args.drafter else ""
    command += " --fleet" if args.fleet else ""
    return f"\nrepeat it with:\n  {command}\n"


def models_of(args: argparse.Namespace) -> list[str]:
    """The models to draw from."""
    from tests.support.drafters import TARGETS
    from tests.support.hybrid_models import HYBRIDS
    from tests.support.models import TINY

    known = sorted(TINY) + sorted(HYBRIDS)
    if args.drafter:
        known = sorted(set().union(*TARGETS.values()))
    models = args.models.split(",") if args.models else known
    if unknown := set(models) - set(known):
        known = ", ".join(known)
        sys.exit(f"--models: {', '.join(sorted(unknown))} not among {known}")
    return models


def play_rounds(args: argparse.Namespace, models: list[str], seed: int, folder: Path) -> Any:
    """Play until something is found or the time is up; the `Report`, or None if a round raised."""
    from tests.fuzz.draw import draw_round
    from tests.fuzz.play import Rounds
    from tests.fuzz.report import Report

    report = Report()
    deadline = time.monotonic() + 60 * args.minutes
    number = 0 if args.round is None else args.round
    player = Rounds(folder)
    while args.round is not None or time.monotonic() < deadline:
        round_ = draw_round(f"{seed}-{number}", models, args.elsewhere, args.drafter, args.fleet)
        try:
            played = player.compare(round_)
        except Exception:
            traceback.print_exc()
            report.show(round_, None)
            print(repeat_command(seed, number, args))
            return None
        report.add(round_, played)
        if report.failed or number % 10 == 0:
            left = max(0, deadline - time.monotonic()) / 60
            print(f"round {number}: {report.summary()}; {left:.0f} min left", flush=True)
        if report.failed:
            report.show(round_, played)
            print(repeat_command(seed, number, args))
        if report.failed or args.round is not None:
            break
        number += 1
    return report


def main(argv: Sequence[str]) -> int:
    """Play rounds; 1 if something was found or a round raised."""
    args = parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    # vLLM is imported from here on, so that --help is fast.
    models = models_of(args)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = play_rounds(args, models, seed, Path(folder))
    if report is None:
        return 1
    print(report.table())
    print(report.summary())
    return 1 if report.failed else 0
