"""Compare engines behind a load balancer: each alone, as a fleet that shares, and one for all."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command_line import (
    PROMPT_LINES,
    check_outputs,
    engine_environment,
    interrupted,
    kv_cache_bytes,
    model_parser,
)
from benchmarks.engines.arguments import engine_arg
from benchmarks.engines.fresh_engine import FreshEngine
from benchmarks.fleet.server import redis_server
from benchmarks.prompts import Prompt, PromptError, context_length, load_prompts, model_tokenizer
from benchmarks.rollouts.engine import Batch, Job, Request, Rollout
from lookahead_vllm.cli.arguments import positive
from lookahead_vllm.machine import cpu_name, versions
from lookahead_vllm.simulation.markdown import MISSING, markdown, number

EPILOG = f"""\
example:
  apt-get install redis-server
  python scripts/bench_fleet.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts prompts.jsonl --repeat 4 --nodes 16 --dtype float32 --json out.json

{PROMPT_LINES}

columns, for each quarter of the requests:
  alone, fleet   tokens a step of a request, its prefill included: the mean of the engines, and in
                 brackets the lowest and the highest
  one            the same of one engine that gets all requests
  restarted      of one engine of the fleet that was started anew, with an empty trie, before the
                 last quarter; and of one of the engines that are alone

how it measures:
  Each prompt is sent --repeat times, in random order, with seeds of its own. A load balancer gives
  each request to one of --engines engines at random. All arms get the same requests in the same
  order; the engines of an arm run at the same time, each with --at-once requests at a time. Drafts
  have up to --nodes nodes, whatever they cost, so that other programs on the machine do not change
  how many are sent. The fleet's server is a redis-server that the benchmark starts.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = model_parser(__doc__, EPILOG)
    add = result.add_argument
    add("--limit", type=positive, metavar="N", help="take N prompts, spread over the categories")
    add("--engines", type=positive, default=4, metavar="N", help="default: 4")
    add(
        "--at-once",
        type=positive,
        default=4,
        metavar="N",
        help="requests of an engine (default: 4)",
    )
    add("--repeat", type=positive, default=4, metavar="N", help="of each prompt (default: 4)")
    add("--nodes", type=positive, default=16, metavar="N", help="of a draft (default: 16)")
    add("--temperature", type=float, default=0.6, metavar="T", help="default: 0.6")
    add("--engine-arg", action="append", type=engine_arg, default=[], metavar="KEY=VALUE")
    return result


@dataclass
class Answered:
    """Requests that an engine has answered: in which quarter, its number, tokens and steps."""

    arm: str
    quarter: int
    engine: int
    is_restarted: bool
    tokens: int
    steps: int
    lag_seconds: float | None


class FleetBenchmark:
    """All arms of one call, and their results so far."""

    def __init__(self, options: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
        self.options, self.prompts = options, prompts
        self.answered: list[Answered] = []
        self._logs = Path(tempfile.mkdtemp(prefix="lookahead-fleet-"))
        rng = random.Random(0)
        count = len(prompts) * options.repeat
        requests = [Request(i % len(prompts), i) for i in range(count)]
        rng.shuffle(requests)
        self._requests = requests
        self._engine_of = [rng.randrange(options.engines) for _ in requests]

    def run(self) -> None:
        """Run one arm after another."""
        count = self.options.engines
        with redis_server() as url, tqdm(total=3 * 4, unit="quarter") as bar:
            for arm, engines, share_with in (
                ("alone", count, None),
                ("fleet", count, url),
                ("one", 1, None),
            ):
                bar.set_description(arm)
                self._run_arm(arm, engines, share_with, bar)

    def _run_arm(self, arm: str, count: int, url: str | None, bar: Any) -> None:
        with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
            engines = [self._start(stack, f"{arm}-{i}", url) for i in range(count)]
            restarted = -1
            for quarter in range(4):
                if quarter == 3 and count > 1:
                    engines[0], restarted = self._start(stack, f"{arm}-again", url), 0
                    time.sleep(5)  # as a load balancer waits for a new replica
                chosen = range(
                    quarter * len(self._requests) // 4, (quarter + 1) * len(self._requests) // 4
                )
                parts: list[list[Request]] = [[] for _ in engines]
                for i in chosen:
                    parts[self._engine_of[i] % count].append(self._requests[i])
                for number, rollout in enumerate(pool.map(self._ask, engines, parts)):
                    self.answered.append(
                        Answered(
                            arm,
                            quarter,
                            number,
                            number == restarted,
                            sum(map(len, rollout.token_ids)),
                            sum(rollout.steps),
                            rollout.lag_seconds,
                        )
                    )
                bar.update()

    def _ask(self, engine: FreshEngine, requests: list[Request]) -> Rollout:
        return Rollout(**engine.ask(asdict(Batch(requests))))

    def _start(self, stack: ExitStack, name: str, url: str | None) -> FreshEngine:
        options = self.options
        config = {"method": "lookahead", "proposer": "ngram_trie", "budget": options.nodes}
        args: dict[str, Any] = dict(
            model=options.model,
            dtype=options.dtype,
            max_model_len=context_length(self.prompts, options.max_tokens, options.model),
            max_num_seqs=options.at_once,
            # No prompt is cut: on CPU, vLLM 0.32 crashes on a seeded request with a cut prompt.
            max_num_batched_tokens=options.at_once
            * max(129, *(len(prompt.token_ids) for prompt in self.prompts)),
            speculative_config=config if url is None else {**config, "share_with": url},
            **dict(options.engine_arg),
        )
        if size := kv_cache_bytes(options):
            args["kv_cache_memory_bytes"] = size
        prompts = [prompt.token_ids for prompt in self.prompts]
        engine = FreshEngine(
            "benchmarks.rollouts.engine",
            asdict(Job(args, prompts, options.max_tokens, options.temperature)),
            {**engine_environment(options), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            self._logs / f"{name}.log",
            lambda event: None,
        )
        stack.enter_context(engine)
        engine.wait_until_ready()
        return engine


def table(answered: Sequence[Answered]) -> str:
    """A line for each quarter, and the lag of the fleet."""

    def figures(arm: str, quarter: int, is_restarted: bool = False) -> str:
        rates = [
            one.tokens / one.steps
            for one in answered
            if (one.arm, one.quarter, one.is_restarted) == (arm, quarter, is_restarted)
            and one.steps
        ]
        if not rates:
            return MISSING
        mean = number(statistics.mean(rates))
        return mean if len(rates) == 1 else f"{mean} ({number(min(rates))}–{number(max(rates))})"

    body = [
        [
            str(quarter + 1),
            *(figures(arm, quarter) for arm in ("alone", "fleet", "one")),
            *(figures(arm, quarter, True) for arm in ("alone", "fleet")),
        ]
        for quarter in range(4)
    ]
    head = ["quarter", "alone", "fleet", "one", "alone, restarted", "fleet, restarted"]
    lags = [1000 * one.lag_seconds for one in answered if one.lag_seconds is not None]
    lag = f"\nlag of a message: {statistics.median(lags):.0f} ms" if lags else ""
    return markdown(head, body) + lag


def main(argv: Sequence[str]) -> int:
    """Run the benchmark of the command line; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        check_outputs(options, PromptError)
        prompts = load_prompts(options.prompts, model_tokenizer(options.model), options.limit)
        if shutil.which("redis-server") is None:
            raise PromptError("redis-server is not installed; write apt-get install redis-server")
    except PromptError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    benchmark = FleetBenchmark(options, prompts)
    was_interrupted = interrupted(benchmark.run)
    print(table(benchmark.answered))
    if options.json:
        content = {
            "command": list(argv),
            "cpu": cpu_name(),
            "versions": versions(),
            "answered": [asdict(one) for one in benchmark.answered],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 130 if was_interrupted else 0
