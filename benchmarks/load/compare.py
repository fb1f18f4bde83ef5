"""Change the batch size and the load of a core during a run, and record every step."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command_line import (
    PROMPT_LINES,
    add_engine_arg,
    engine_environment,
    engine_parser,
    interrupted,
    kv_cache_bytes,
)
from benchmarks.engines.fresh_engine import FreshEngine, RunFailed
from benchmarks.load import steps as steps_module
from benchmarks.load.report import Phase, by_phase, plot, table
from benchmarks.load.steps import LoadJob, Step
from benchmarks.methods import MethodError, SpeculativeConfig, choose_methods
from benchmarks.prompts import PromptError, context_length, load_prompts, model_tokenizer
from lookahead_vllm.cli.arguments import check_outputs, positive
from lookahead_vllm.machine import cpu_name, versions

PHASES = "1:20,64:40,64:20:busy,64:10,1:30,1:15:busy,1:15"

EPILOG = f"""\
examples:
  python scripts/bench_load.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts prompts.jsonl --json out.json --plot out.png

  a quick look
      --phases 1:5,8:5,8:5:busy,1:5 --max-tokens 32 --engine-arg enforce_eager=true

{PROMPT_LINES}

columns, for each phase:
  requests      that got tokens in a step; the median
  tokens/s      emitted tokens over the phase's time
  ratio         over plain vLLM's (`none`) in the same phase
  step ms       a step's time, where it read no prompt; the median
  nodes/step    draft tokens that a step verified, of all requests together: the budget
  predicted ms  the prediction of these steps by lookahead's cost model; the median
  error         of the prediction over the step's time, without its sign; the median

how it measures:
  Each method has an engine of its own, one after the other, warmed up and with cold drafters.
  In a phase SIZE:SECONDS, SIZE requests are kept running: when one ends, another is sent. After
  a larger phase its requests are answered first. In a phase SIZE:SECONDS:busy another process
  computes on one core: the first of the engine's worker, or --busy-core. Prompts are shuffled,
  and the same for all methods; when they are used up they are sent again, with another
  `cache_salt`, so that their first answers do not help. Decoding is greedy, up to the end of
  sequence or --max-tokens. Steps are recorded from the messages that the engine's core sends
  after each step. The picture has a point for each second, the JSON every step.

The exit status is 0 if all methods finished, 1 if one failed, 2 for wrong options, 130 after
Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = engine_parser(__doc__, EPILOG, "none,lookahead")
    add = result.add_argument
    add("--phases", type=phases, default=PHASES, metavar="A,B", help=f"default: {PHASES}")
    add("--busy-core", type=int, metavar="N", help="default: the worker's first core")
    add_engine_arg(result)
    return result


def phases(text: str) -> list[Phase]:
    """SIZE:SECONDS or SIZE:SECONDS:busy, separated by commas."""
    plan = []
    for part in text.split(","):
        size, *rest = part.split(":")
        try:
            seconds, busy = float(rest[0]), rest[1:]
        except (IndexError, ValueError):
            seconds, busy = 0.0, []
        if not 0 < seconds < float("inf") or busy not in ([], ["busy"]):
            raise argparse.ArgumentTypeError(f"{part!r} is not a phase; write for example {PHASES}")
        plan.append(Phase(positive(size), seconds, bool(busy)))
    return plan


class LoadBenchmark:
    """The runs of one call, and their results so far."""

    def __init__(
        self,
        options: argparse.Namespace,
        methods: dict[str, SpeculativeConfig | None],
        prompts: Sequence[list[int]],
        length: int,
    ) -> None:
        self.options = options
        self.methods = methods
        self.prompts = prompts
        self.args: dict[str, Any] = {
            "model": options.model,
            "dtype": options.dtype,
            "max_model_len": length,
            "max_num_seqs": max(phase.batch_size for phase in options.phases),
            "seed": 0,
        }
        if size := kv_cache_bytes(options):
            self.args["kv_cache_memory_bytes"] = size
        self.args |= dict(options.engine_arg)
        self.environment = engine_environment(options)
        self.runs: dict[str, list[Step]] = {}
        self.failed: dict[str, str] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="lookahead-bench-load-"))

    def run(self) -> None:
        """Run one method after the other; one that fails is reported."""
        for method in self.methods:
            log = self.folder / f"{method}.log".replace("/", "_")
            try:
                self.runs[method] = self._run_one(method, log)
            except RunFailed as error:
                self.failed[method] = str(error)
                print(f"\n{method} failed: {error}; its log is {log}", file=sys.stderr)

    def _run_one(self, method: str, log: Path) -> list[Step]:
        args = dict(self.args)
        if self.methods[method] is not None:
            args["speculative_config"] = self.methods[method]
        job = asdict(LoadJob(args, list(self.prompts), self.options.max_tokens))
        plan: list[Phase] = self.options.phases
        with tqdm(total=len(plan), desc=f"{method}: starting", unit="phase") as bar:

            def show(event: dict[str, Any]) -> None:
                if event["event"] != "phase":
                    bar.set_description(f"{method}: {event['event']}")
                    return
                phase = plan[event["phase"]]
                bar.update(event["phase"] - bar.n)
                bar.set_description(f"{method}: {phase}")

            with FreshEngine(steps_module.__name__, job, self.environment, log, show) as engine:
                engine.wait_until_ready()
                core = self._busy_core(engine)
                steps = engine.ask(
                    [(p.batch_size, p.seconds, core if p.busy else None) for p in plan]
                )
            bar.update(len(plan) - bar.n)
        return [Step(**step) for step in steps]

    def _busy_core(self, engine: FreshEngine) -> int:
        if self.options.busy_core is not None:
            return int(self.options.busy_core)
        return min(engine.bound_cores() or os.sched_getaffinity(0))

    def content(self, argv: Sequence[str]) -> dict[str, Any]:
        """The JSON: all results, and what is needed to repeat the benchmark."""
        plan: list[Phase] = self.options.phases
        return {
            "meta": {
                "model": self.options.model,
                "versions": versions(),
                "cpu": cpu_name(),
                "cores": os.cpu_count(),
                "prompts": {"file": str(self.options.prompts), "count": len(self.prompts)},
                "max_tokens": self.options.max_tokens,
                "methods": self.methods,
                "engine_args": self.args,
                "argv": list(argv),
            },
            "phases": [asdict(phase) for phase in plan],
            "by_phase": by_phase(self.runs, plan),
            "steps": {method: [asdict(step) for step in run] for method, run in self.runs.items()},
            "failed": self.failed,
        }


def report(benchmark: LoadBenchmark, argv: Sequence[str]) -> None:
    """Print the table of the finished runs; write the JSON and the picture."""
    options = benchmark.options
    if options.json:
        options.json.write_text(json.dumps(benchmark.content(argv)) + "\n")
    if not benchmark.runs:
        return
    title = f"{Path(options.model).name}, {options.dtype}, {cpu_name()}"
    print(f"\n{title} ({os.cpu_count()} cores)\n\n{table(benchmark.runs, options.phases)}")
    if options.plot:
        plot(benchmark.runs, options.phases, options.plot, title)


def prepare(options: argparse.Namespace) -> LoadBenchmark:
    """Check everything that can be checked before the first engine starts."""
    methods = choose_methods(options.methods, options.config)
    check_outputs(options, MethodError)
    prompts = load_prompts(options.prompts, model_tokenizer(options.model))
    random.Random(0).shuffle(prompts)
    length = context_length(prompts, options.max_tokens, options.model)
    return LoadBenchmark(options, methods, [prompt.token_ids for prompt in prompts], length)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; the exit status is explained in `--help`."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        benchmark = prepare(options)
    except (MethodError, PromptError) as error:
        arguments.error(str(error))
    status = 130 if interrupted(benchmark.run) else 0
    report(benchmark, argv)
    if benchmark.failed:
        return status or 1
    shutil.rmtree(benchmark.folder, ignore_errors=True)
    return status
