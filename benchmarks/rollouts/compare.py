"""Compare methods on rollouts: samples of the same prompts, again and again as weights change."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command_line import (
    PROMPT_LINES,
    check_outputs,
    engine_environment,
    engine_parser,
    interrupted,
    kv_cache_bytes,
)
from benchmarks.engines.arguments import engine_arg
from benchmarks.engines.fresh_engine import FreshEngine, RunFailed
from benchmarks.methods import MethodError, SpeculativeConfig, choose_methods
from benchmarks.prompts import Prompt, PromptError, context_length, load_prompts, model_tokenizer
from benchmarks.rollouts.engine import Batch, Job, Request, Rollout
from benchmarks.rollouts.figures import Epoch, plot, table
from lookahead_vllm.cli.arguments import positive
from lookahead_vllm.engine.plugin import PLAIN_V2
from lookahead_vllm.machine import cpu_name, versions

EPILOG = f"""\
examples:
  python scripts/bench_rollouts.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts prompts.jsonl --limit 4 --samples 8 --epochs 3 --dtype float32

  as on a device whose steps take hardly longer with more tokens
      --methods none --config 'budget16={{"method":"lookahead","budget":16}}'

{PROMPT_LINES}

columns:
  steps        steps of the engine to the end of the batch
  ratio        over plain vLLM's (`none`) in the same epoch
  tail         the steps after nine of ten requests have ended
  tokens/step  tokens that a request emitted in a step, its prefill included
  seconds      wall time of the batch
  speed-up     plain vLLM's seconds over the method's, in the same epoch
  differing    samples whose token ids differ from plain vLLM's (expect zero only with
               --dtype float32: bfloat16 rounds a step of several tokens differently)

how it measures:
  Each method has an engine, and all engines live until the end and take turns, in alternating
  order. In an epoch, an engine gets --samples requests for each prompt at once, and runs all of
  them at a time, as a trainer's rollout does. Each request has a seed of its own, the same for all
  methods, and another one in each epoch (unless --same-seeds). Before every epoch but the first,
  normal noise is added to each weight matrix, --drift times its standard deviation, by vLLM's
  `reload_weights`: by default as much as some hundred steps of Adam at a rate of 1e-6. The texts
  change with it. What an engine has learned stays.
  On CPUs, plain vLLM runs Model Runner V2 too, so that seeded samples can be compared; vLLM 0.32's
  own speculation (`ngram`, `suffix`) samples wrong tokens there at temperatures above 0.
  `python -m benchmarks.rollouts.replay OUT.json` replays plain vLLM's samples through `suffix` and
  through the trie.

The exit status is 0 if all methods finished, 1 if one failed, 2 for wrong options, 130 after
Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = engine_parser(__doc__, EPILOG, "none,lookahead")
    add = result.add_argument
    add("--limit", type=positive, metavar="N", help="take N prompts, spread over the categories")
    add("--samples", type=positive, default=8, metavar="N", help="of each prompt (default: 8)")
    add("--epochs", type=positive, default=3, metavar="N", help="default: 3")
    add("--temperature", type=float, default=1.0, metavar="T", help="default: 1")
    add("--drift", type=float, default=0.0005, metavar="X", help="see below (default: 0.0005)")
    add(
        "--same-seeds",
        action="store_true",
        help="a sample has one seed in all epochs, so its text changes with the weights alone",
    )
    add(
        "--engine-arg",
        action="append",
        type=engine_arg,
        default=[],
        metavar="KEY=VALUE",
        help="a further argument of `vllm.LLM`; repeatable",
    )
    return result


class RolloutBenchmark:
    """All epochs of one call, and their results so far."""

    def __init__(
        self,
        options: argparse.Namespace,
        methods: dict[str, SpeculativeConfig | None],
        prompts: Sequence[Prompt],
    ) -> None:
        self.options, self.methods, self.prompts = options, methods, prompts
        self.epochs: dict[str, list[Epoch]] = {method: [] for method in methods}
        self.failures: dict[str, str] = {}
        self._logs = Path(tempfile.mkdtemp(prefix="lookahead-rollouts-"))

    def run(self) -> None:
        """Run all epochs, the methods in turn."""
        count = self.options.epochs * len(self.methods)
        with ExitStack() as stack, tqdm(total=count, unit="batch") as bar:
            engines = {}
            for method in self.methods:
                bar.set_description(f"{method} starts")
                engines[method] = stack.enter_context(self._engine(method))
                self._surviving(method, engines[method].wait_until_ready)
            for epoch in range(self.options.epochs):
                for method in list(self.methods)[:: -1 if epoch % 2 else 1]:
                    bar.set_description(f"epoch {epoch + 1}, {method}")
                    if method not in self.failures:
                        question = asdict(self.batch(epoch))
                        answer = self._surviving(
                            method, lambda q=question, e=engines[method]: e.ask(q)
                        )
                        if answer is not None:
                            rollout = Rollout(**answer)
                            self.epochs[method].append(Epoch.of(rollout))
                    bar.update()

    def _surviving(self, method: str, call: Any) -> Any:
        try:
            return call()
        except RunFailed as error:
            self.failures[method] = str(error)
            return None

    def _engine(self, method: str) -> FreshEngine:
        options, prompts = self.options, [prompt.token_ids for prompt in self.prompts]
        num_requests = len(prompts) * options.samples
        length = context_length(self.prompts, options.max_tokens, options.model)
        args: dict[str, Any] = dict(
            model=options.model,
            dtype=options.dtype,
            max_model_len=length,
            max_num_seqs=num_requests,
            # No prompt is cut: on CPU, vLLM 0.32 crashes on a seeded request with a cut prompt.
            max_num_batched_tokens=max(
                num_requests * 129, sum(map(len, prompts)) * options.samples
            ),
            enable_prefix_caching=True,
            disable_log_stats=True,
            **dict(options.engine_arg),
        )
        if size := kv_cache_bytes(options):
            args["kv_cache_memory_bytes"] = size
        if self.methods[method] is not None:
            args["speculative_config"] = self.methods[method]
        job = Job(args, prompts, options.max_tokens, options.temperature)
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", PLAIN_V2: "1"}
        return FreshEngine(
            "benchmarks.rollouts.engine",
            asdict(job),
            {**engine_environment(options), **environment},
            self._logs / f"{method}.log",
            lambda event: None,
        )

    def batch(self, epoch: int) -> Batch:
        """What the engines get in an epoch."""
        draw = 0 if self.options.same_seeds else epoch
        samples = self.options.samples
        requests = [
            Request(i, (draw * len(self.prompts) + i) * samples + sample)
            for i in range(len(self.prompts))
            for sample in range(samples)
        ]
        return Batch(requests, self.options.drift, list(range(1, epoch + 1)))


def report(benchmark: RolloutBenchmark) -> str:
    """The table, and why methods failed."""
    lines = [table(benchmark.epochs)]
    lines += [f"failed: {method}: {reason}" for method, reason in benchmark.failures.items()]
    return "\n".join(lines)


def content(benchmark: RolloutBenchmark, argv: Sequence[str]) -> dict[str, Any]:
    """What --json writes; `replay.py` reads it."""
    return {
        "command": list(argv),
        "cpu": cpu_name(),
        "versions": versions(),
        "prompts": [prompt.token_ids for prompt in benchmark.prompts],
        "prompt_of_sample": [request.prompt for request in benchmark.batch(0).requests],
        "epochs": {method: list(map(asdict, own)) for method, own in benchmark.epochs.items()},
        "failures": benchmark.failures,
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark of the command line; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        check_outputs(options, PromptError)
        methods = choose_methods(options.methods, options.config)
        prompts = load_prompts(options.prompts, model_tokenizer(options.model), options.limit)
    except (MethodError, PromptError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    benchmark = RolloutBenchmark(options, methods, prompts)
    was_interrupted = interrupted(benchmark.run)
    print(report(benchmark))
    if options.json:
        options.json.write_text(json.dumps(content(benchmark, argv), indent=1) + "\n")
    if options.plot:
        plot(benchmark.epochs, options.plot)
    if was_interrupted:
        return 130
    return 1 if benchmark.failures else 0
