#!/usr/bin/env python3
"""Ask plain vLLM and lookahead the same random things, until their answers differ."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.simplefilter("ignore")

EPILOG = """\
A round draws a tiny random model in float32, settings of the server, a proposer and 16 to 40
requests; plain vLLM answers them, then lookahead does, under settings of its own that must change
no text: prompts in chunks, preemption, prefix caching, small blocks, few requests at once. Token
ids, texts, finish reasons and logprobs are compared. The first difference ends the run, with both
answers and the command that repeats its round.

Float32 sums depend in their last bits on the shape of a batch. Where two tokens are equally likely
up to those bits, plain vLLM itself answers differently in other company: a difference that plain
vLLM shows too, in one of eight other batches or of eight times with the last bits of its logits
drawn anew, is counted as a tie and not as a mismatch.

A draft with an n-gram that its request cannot know, because only another namespace has seen it, is
a leak. It ends the run, too.

examples:
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 60
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --seed 7 --round 12
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 2 --plant kv
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 5 --plant namespace
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 10 --http --ranks 2
  scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 60 --second-runner
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument(
        "--seed", type=int, default=None, help="of all rounds (default: a fresh one, printed)"
    )
    parser.add_argument("--round", type=int, default=None, help="play this round alone")
    parser.add_argument(
        "--model",
        type=Path,
        help="this model instead of the tiny ones; prompts are cut from this project's README",
    )
    parser.add_argument(
        "--http",
        action="store_true",
        help="two real servers for each round, and clients that all ask at once; lookahead hears "
        "everything twice, and has a proposer of its own, not one of the tests'",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="with --http: each server is spread over so many processes, by tensor parallelism",
    )
    parser.add_argument(
        "--second-runner",
        action="store_true",
        help="plain vLLM runs on its second model runner, its default on GPUs, under Triton's "
        "interpreter, which is some five times as slow",
    )
    parser.add_argument(
        "--models", default=None, help="names from tests/support/models.py (default: all)"
    )
    parser.add_argument(
        "--plant",
        choices=("mask", "kv", "generator", "namespace", "row"),
        help="plant a bug in lookahead, to see that it is found: a wrong bit in a tree's mask, "
        "KV moved one slot too far, a generator one draw ahead, one namespace for all requests, "
        "the prompt of whoever had the request's row before",
    )
    args = parser.parse_args()
    if args.plant and args.http:
        parser.error("--plant reaches engines in this process, not servers; leave --http out")
    if args.second_runner and args.http:
        parser.error("--second-runner is for this process, not for servers; leave --http out")
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks} was given, but a server has 1 or more")
    if args.ranks != 1 and not args.http:
        parser.error("--ranks is for servers; write --http, too")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model: there is no {args.model / 'config.json'}")
    if args.round is not None and args.seed is None:
        parser.error("--round needs the --seed that it was printed with")
    return args


def main() -> int:
    args = parse_args()
    # Engines are not loaded for --help.
    if args.second_runner:
        from tests.support import second_runner

        second_runner.bring(own_noise=True)
    from transformers import AutoTokenizer

    from tests.fuzz.draw import draw_round
    from tests.fuzz.over_http import Servers
    from tests.fuzz.plant import planted
    from tests.fuzz.play import Rounds
    from tests.fuzz.report import Report
    from tests.support.models import TINY

    models = args.models.split(",") if args.models else sorted(TINY)
    if unknown := set(models) - set(TINY):
        sys.exit(f"--models: {', '.join(sorted(unknown))} not among {', '.join(sorted(TINY))}")
    text = None
    if args.model:
        models = [str(args.model)]
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        text = AutoTokenizer.from_pretrained(args.model).encode(readme)
    elif args.http:
        models = ["llama"]
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    report = Report()
    deadline = time.monotonic() + 60 * args.minutes
    number = 0 if args.round is None else args.round
    with tempfile.TemporaryDirectory() as folder, planted(args.plant):
        side_by_side = (
            Servers(Path(folder), args.model, args.ranks) if args.http else Rounds(Path(folder))
        )
        while args.round is not None or time.monotonic() < deadline:
            round_ = draw_round(f"{seed}-{number}", models, text, args.http, args.second_runner)
            try:
                played = side_by_side.compare(round_)
            except Exception:
                traceback.print_exc()
                report.show(round_, None)
                print(repeat(seed, number, args))
                return 1
            report.add(round_, played)
            if report.failed or args.http or number % 10 == 0:
                left = max(0, deadline - time.monotonic()) / 60
                print(f"round {number}: {report.summary()}; {left:.0f} min left", flush=True)
            if report.failed:
                report.show(round_, played)
                print(repeat(seed, number, args))
            if report.failed or args.round is not None:
                break
            number += 1
    print(report.table())
    print(report.summary())
    return 1 if report.failed else 0


def repeat(seed: int, number: int, args: argparse.Namespace) -> str:
    command = f"scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --seed {seed} --round {number}"
    command += f" --models {args.models}" if args.models else ""
    command += f" --model {args.model}" if args.model else ""
    command += " --http" if args.http else ""
    command += f" --ranks {args.ranks}" if args.ranks != 1 else ""
    command += " --second-runner" if args.second_runner else ""
    command += f" --plant {args.plant}" if args.plant else ""
    return f"\nrepeat it with:\n  {command}\n"


if __name__ == "__main__":
    sys.exit(main())
