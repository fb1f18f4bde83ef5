"""Compare speculative decoding methods in vLLM: same prompts, a fresh engine for each run."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command_line import (
    check_outputs,
    engine_environment,
    interrupted,
    kv_cache_bytes,
    rank_environment,
)
from benchmarks.engines import generate
from benchmarks.engines.arguments import parser
from benchmarks.engines.fresh_engine import FreshEngine, RunFailed
from benchmarks.engines.generate import Job, Turn
from benchmarks.engines.rows import Outcome, Row, Run, make_row
from benchmarks.methods import BASELINE, MethodError, SpeculativeConfig, choose_methods
from benchmarks.prompts import (
    Prompt,
    PromptError,
    Tokenize,
    context_length,
    load_prompts,
    model_tokenizer,
)
from benchmarks.tables import category_tables, main_table, turn_table, verdicts
from lookahead_vllm.cli.arguments import escape_unprintable
from lookahead_vllm.machine import cpu_name, versions
from lookahead_vllm.options.server import HAVE_WINDOW


def by_size(name: str, options: argparse.Namespace) -> dict[int, Any]:
    """An option's value for each batch size; PromptError if their numbers do not match."""
    sizes, values = options.batch_sizes, getattr(options, name)
    if len(values) not in (1, len(sizes)):
        raise PromptError(
            f"--{name}: {len(values)} numbers for {len(sizes)} batch sizes; give one for all, or "
            "one for each"
        )
    return dict(zip(sizes, values * (len(sizes) // len(values)), strict=True))


def engine_args(options: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that all runs share."""
    length = context_length(prompts, options.max_tokens, options.model)
    for prompt in prompts:
        if len(prompt.token_ids) >= length:
            raise PromptError(
                f"{options.prompts}, line {prompt.line}: {len(prompt.token_ids)} tokens leave no "
                f"room for an answer in the model's {length} positions"
            )
    args: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": length,
        "enable_prefix_caching": options.prefix_caching,
        "seed": 0,
    }
    if size := kv_cache_bytes(options):
        args["kv_cache_memory_bytes"] = size
    if options.adversarial:
        args["load_format"] = "dummy"
    return {**args, **{key: value for key, value in options.engine_arg if ":" not in key}}


def method_args(options: argparse.Namespace, methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The arguments of `vllm.LLM` that one method alone has, by method."""
    result: dict[str, dict[str, Any]] = {name: {} for name in methods}
    for key, value in options.engine_arg:
        name, separator, key = key.rpartition(":")
        if separator and name not in result:
            raise MethodError(f"--engine-arg: there is no method {name!r} here")
        if separator:
            result[name][key] = value
    return result


class Progress:
    """Shows the state of one method's engine, on a progress bar that engines may share."""

    def __init__(self, bar: tqdm[Any], name: str) -> None:
        self.bar = bar
        self.name = name
        self._start = 0

    def show(self, event: dict[str, Any]) -> None:
        """Show an event of the engine."""
        if event["event"] == "finished":
            self.bar.update(self._start + event["done"] - self.bar.n)
            return
        self.bar.set_description(f"{self.name}: {event['event']}")
        if event["event"] == "generating":
            self._start = self.bar.n
            if not self.bar.n:
                self.bar.unpause()  # the estimate of the time left excludes the start-up
                self.bar.start_t = self.bar.last_print_t


class Benchmark:
    """All runs of one call, and their results so far.

    `prompts` and `turns` are by batch size: the prompts, and the number of turns to answer them in;
    `method_args` are the arguments that one method alone has.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        methods: dict[str, SpeculativeConfig | None],
        prompts: dict[int, list[Prompt]],
        turns: dict[int, int],
        method_args: dict[str, dict[str, Any]],
    ) -> None:
        self.options = options
        self.methods = methods
        self.prompts = prompts
        self.turns = turns
        self.args = engine_args(options, [*itertools.chain(*prompts.values())])
        self.method_args = method_args
        self.environment = engine_environment(options)
        if options.target_guided or options.trace:
            self.environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions to the worker
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        """By method and batch size, of those that have run."""
        self.logs = Path(tempfile.mkdtemp(prefix="lookahead-bench-"))

    def run(self) -> None:
        """Run every method at every batch size."""
        methods = [*self.methods]
        batches = [[*self.prompts]] if self.options.one_engine else [[s] for s in self.prompts]
        for sizes in batches:
            together = any(self.turns[size] > 1 for size in sizes)
            for group in [methods] if together else [[method] for method in methods]:
                self._run_group(group, sizes)

    def _run_group(self, methods: list[str], sizes: Sequence[int]) -> None:
        """Start the engines of these methods, and let them take turns with the prompts of each
        batch size."""
        name = f"batch {', '.join(map(str, sizes))}"
        count = sum(len(self.prompts[size]) for size in sizes)
        bar_format = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}, {remaining} left"
        engines: dict[str, FreshEngine] = {}
        logs = {method: self._log(method, sizes[0]) for method in methods}
        with ExitStack() as stack, tqdm(total=count * len(methods), bar_format=bar_format) as bar:
            for method in methods:
                with self._recording_failure(method, sizes, logs[method]):
                    progress = Progress(bar, f"{method}, {name}")
                    engine = self._engine(method, sizes, logs[method], progress)
                    engines[method] = stack.enter_context(engine)
                    engine.wait_until_ready()
            first = 0
            for size in sizes:
                end = first + len(self.prompts[size])
                turns: dict[str, list[Turn]] = {method: [] for method in engines}
                for part in range(self.turns[size]):
                    chosen = list(range(first + part, end, self.turns[size]))
                    for method in methods[:: -1 if part % 2 else 1]:
                        if (method, size) in self.outcomes:  # it has failed
                            continue
                        with self._recording_failure(method, [size], logs[method]):
                            question = {"prompts": chosen, "batch_size": size}
                            turns[method].append(Turn.read(engines[method].ask(question)))
                for method, engine in engines.items():
                    run = Run(turns[method], engine.bound_cores())
                    self.outcomes.setdefault((method, size), Outcome(run))
                    if self.options.trace and turns[method]:
                        self._trace(engine, method, size, chosen)
                first = end

    def _trace(self, engine: FreshEngine, method: str, size: int, chosen: list[int]) -> None:
        """Write some steps of another turn, with the prompts of the last one."""
        path = self.options.trace.absolute() / f"{method}-{size}.json"
        try:
            engine.ask({"prompts": chosen, "batch_size": size, "trace": str(path)})
        except RunFailed as error:
            print(f"\n{path.name} failed: {error}", file=sys.stderr)

    def _engine(
        self, method: str, sizes: Sequence[int], log: Path, progress: Progress
    ) -> FreshEngine:
        args = {**self.args, **self.method_args[method], "max_num_seqs": max(sizes)}
        if self.methods[method] is not None:
            args["speculative_config"] = self.methods[method]
        prompts = [prompt for size in sizes for prompt in self.prompts[size]]
        answers = [prompt.answer or [] for prompt in prompts]
        references = [prompt.reference or [] for prompt in prompts]
        job = Job(
            args,
            [prompt.token_ids for prompt in prompts],
            self.options.max_tokens,
            self.options.adversarial,
            answers if self.options.target_guided else None,
            references if method in self.options.references else None,
        )
        progress.show({"event": "starting"})
        ranks = args.get("tensor_parallel_size", 1)
        of_ranks = rank_environment(self.options, self.methods[method], ranks)
        environment = {**self.environment, **of_ranks}
        return FreshEngine(generate.__name__, asdict(job), environment, log, progress.show)

    def _log(self, method: str, size: int) -> Path:
        return self.logs / f"{method}-{size}.log".replace("/", "_")

    @contextmanager
    def _recording_failure(self, method: str, sizes: Sequence[int], log: Path) -> Iterator[None]:
        """Catch RunFailed, print it with the end of the log, and make it the method's outcome."""
        try:
            yield
        except RunFailed as error:
            for size in sizes:
                self.outcomes[method, size] = Outcome(error=str(error))
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            print(
                f"\n{method}, batch {', '.join(map(str, sizes))} failed: {error}\n"
                f"The log, {log}, ends with\n{tail}\n",
                file=sys.stderr,
            )

    def rows(self) -> list[Row]:
        """A row for every method and batch size that has run."""
        result = []
        for size, prompts in self.prompts.items():
            categories = [prompt.category for prompt in prompts]
            plain = self.outcomes.get((BASELINE, size), Outcome()).run
            for method in self.methods:
                if outcome := self.outcomes.get((method, size)):
                    exact = self.options.check_exact
                    result.append(make_row(method, size, outcome, plain, categories, exact))
        return result

    def meta(self, argv: Sequence[str]) -> dict[str, Any]:
        """Machine, versions, options and prompts: what is needed to repeat the benchmark."""
        run = next((outcome.run for outcome in self.outcomes.values() if outcome.run), None)
        kinds = ("LOOKAHEAD_", "VLLM_", "OMP_", "KMP_")
        inherited = {name: text for name, text in os.environ.items() if name.startswith(kinds)}
        preloaded = self.environment.get("LD_PRELOAD", "").split(":")
        return {
            "model": self.options.model,
            "dtype": run.turns[0].dtype if run else self.options.dtype,
            "versions": versions(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "worker_cores": run.cores if run else None,
            "environment": {
                **inherited,
                **self.environment,
                "LD_PRELOAD": ":".join(Path(path).name for path in preloaded),
            },
            "prompts": {
                "file": str(self.options.prompts),
                "count": {size: len(prompts) for size, prompts in self.prompts.items()},
                "tokens": {
                    size: sum(len(prompt.token_ids) for prompt in prompts)
                    for size, prompts in self.prompts.items()
                },
            },
            "adversarial": self.options.adversarial,
            "target_guided": self.options.target_guided,
            "references": self.options.references,
            "max_tokens": self.options.max_tokens,
            "turns": self.turns,
            "methods": self.methods,
            "engine_args": self.args,
            "method_args": self.method_args,
            "argv": list(argv),
            "complete": len(self.outcomes) == len(self.methods) * len(self.prompts),
        }

    def traces(self) -> list[dict[str, Any]]:
        """The answers of the first run that has some, as `lookahead-vllm simulate` reads them."""
        for (_, size), outcome in self.outcomes.items():
            if (run := outcome.run) is not None:
                parts = len(run.turns)
                return [
                    {
                        "category": prompt.category,
                        "prompt_token_ids": prompt.token_ids,
                        "output_token_ids": generation.token_ids,
                    }
                    for part, turn in enumerate(run.turns)
                    for prompt, generation in zip(
                        self.prompts[size][part::parts], turn.generations, strict=True
                    )
                ]
        return []

    def clean_up(self) -> None:
        """Delete the logs unless a run failed."""
        if not any(outcome.error for outcome in self.outcomes.values()):
            shutil.rmtree(self.logs, ignore_errors=True)


def report(benchmark: Benchmark, argv: Sequence[str]) -> list[Row]:
    """Print the tables of the finished runs, and write their JSON."""
    options, rows, meta = benchmark.options, benchmark.rows(), benchmark.meta(argv)
    if not rows:
        return rows
    bound = meta["worker_cores"]
    threads = f"on {', '.join(map(str, bound))}" if bound else "not bound"
    counts = sorted({row["prompts"] for row in rows})
    prompts = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
    print(
        f"\n{Path(options.model).name}{', adversarial' * options.adversarial}"
        f"{', target-guided' * options.target_guided}, {meta['dtype']}, "
        f"{prompts} prompts, up to {options.max_tokens} tokens, {meta['cpu']} "
        f"({meta['cores']} cores; the worker {threads})\n"
    )
    print(main_table(rows, options.check_exact))
    if by_turn := turn_table(rows):
        print(f"\n{by_turn}")
    if sentences := verdicts(rows):
        print(f"\n{sentences}")
    if by_category := category_tables(rows):
        print(f"\n{by_category}")
    if options.json:
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    if options.record:
        options.record.write_text("".join(f"{json.dumps(t)}\n" for t in benchmark.traces()))
    return rows


def prepare(options: argparse.Namespace) -> Benchmark:
    """Check everything that can be checked before the first engine starts."""
    methods = choose_methods(options.methods, options.config)
    args_by_method = method_args(options, methods)
    if options.check_exact and BASELINE not in methods:
        raise MethodError(f"--check-exact compares with `{BASELINE}`: add it to --methods")
    if options.check_exact and options.adversarial:
        raise MethodError("--check-exact: with --adversarial, answers are drawn without a seed")
    check_outputs(options, MethodError)
    if options.trace:
        try:
            options.trace.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MethodError(f"--trace: no folder {options.trace}: {error.strerror}") from None
    turns = by_size("turns", options)
    tokenize = model_tokenizer(options.model)
    limits = by_size("limit", options)
    if options.one_engine:
        prompts = prompts_apart(options.prompts, tokenize, limits)
    else:
        prompts = {
            size: load_prompts(options.prompts, tokenize, limit) for size, limit in limits.items()
        }
    for size, chosen in prompts.items():
        if len(chosen) < turns[size]:
            raise PromptError(f"--turns {turns[size]}: batch size {size} has {len(chosen)} prompts")
    if options.target_guided:
        methods = {name: without_choices(config) for name, config in methods.items()}
        check_target_guided(options, methods, prompts)
    check_references(options, methods, prompts)
    return Benchmark(options, methods, prompts, turns, args_by_method)


def prompts_apart(
    path: Path, tokenize: Tokenize, limits: dict[int, int | None]
) -> dict[int, list[Prompt]]:
    """Other prompts for each batch size, as an engine remembers what it has answered."""
    counts = [limit for limit in limits.values() if limit is not None]
    if len(counts) < len(limits):
        raise PromptError("--one-engine needs --limit, as each batch size gets other prompts")
    chosen = load_prompts(path, tokenize, sum(counts))
    if len(chosen) < sum(counts):
        raise PromptError(
            f"--one-engine: the batch sizes need {sum(counts)} prompts together, and {path} has "
            f"{len(chosen)}; write a smaller --limit"
        )
    dealt = random.Random(0).sample(range(len(chosen)), len(chosen))
    firsts = itertools.accumulate(counts, initial=0)
    return {
        size: [chosen[i] for i in sorted(dealt[first : first + count])]
        for size, first, count in zip(limits, firsts, counts, strict=False)
    }


def without_choices(config: SpeculativeConfig | None) -> SpeculativeConfig | None:
    """A method whose proposer "auto" is the trie; where tokens are cheap it would be `hybrid`,
    which learns from what a model says to its drafts."""
    if config and config.get("method") == "lookahead" and config.get("proposer") in (None, "auto"):
        return {**config, "proposer": "ngram_trie"}
    return config


def check_target_guided(
    options: argparse.Namespace,
    methods: dict[str, SpeculativeConfig | None],
    prompts: dict[int, list[Prompt]],
) -> None:
    """Check that every prompt has one recorded answer, and no method needs the model's own."""
    if options.adversarial:
        raise MethodError("--target-guided follows answers, --adversarial has none: leave one out")
    for name, config in methods.items():
        if config and config.get("proposer") in HAVE_WINDOW:
            raise MethodError(
                f"--target-guided: {name} learns from what a model says to its drafts, and "
                "only the answers were recorded; leave it out"
            )
    answers: dict[tuple[int, ...], Sequence[int]] = {}
    for prompt in itertools.chain(*prompts.values()):
        if prompt.answer is None:
            raise PromptError(
                f"{options.prompts}, line {prompt.line}: --target-guided follows recorded answers, "
                "and there are no `output_token_ids`"
            )
        if answers.setdefault(tuple(prompt.token_ids), prompt.answer) != prompt.answer:
            raise PromptError(
                f"{options.prompts}, line {prompt.line}: --target-guided finds an answer by its "
                "prompt, and an earlier line with the same prompt has another answer"
            )


def check_references(
    options: argparse.Namespace,
    methods: dict[str, SpeculativeConfig | None],
    prompts: dict[int, list[Prompt]],
) -> None:
    """Check that the methods of --references take references, and that there are some."""
    for name in options.references:
        config = methods.get(name)
        if config is None or config.get("method") != "lookahead":
            raise MethodError(
                f"--references: {name!r} is not a method here that is lookahead; write for example "
                """--config 'guided={"method":"lookahead"}' --references guided"""
            )
    if options.references and not any(p.reference for p in itertools.chain(*prompts.values())):
        raise PromptError(f"--references: no line of {options.prompts} has `reference_token_ids`")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; the exit status is explained in `--help`."""
    escape_unprintable()
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        benchmark = prepare(options)
    except (MethodError, PromptError) as error:
        arguments.error(str(error))
    stopped = interrupted(benchmark.run)
    rows = report(benchmark, argv)
    benchmark.clean_up()
    if stopped:
        return 130
    return 0 if any(row["tokens_per_s"] for row in rows) else 1
