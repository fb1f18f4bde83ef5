"""Compare servers under load: requests arrive at random and wait for each other."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
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
from benchmarks.methods import BASELINE, MethodError, SpeculativeConfig, choose_methods
from benchmarks.prompts import (
    Prompt,
    PromptError,
    as_texts,
    context_length,
    load_prompts,
    model_tokenizer,
)
from benchmarks.serving.arrivals import (
    MAX_PROMPT_TOKENS,
    Latencies,
    Load,
    LoadFailed,
    bench_serve,
    write_requests,
)
from benchmarks.serving.latencies import Measured, table
from benchmarks.serving.server import ServerError, free_port, serving
from lookahead_vllm.cli.arguments import positive
from lookahead_vllm.machine import cpu_name, versions

LOADS = (0.25, 0.5, 1.0)
"""Shares of plain vLLM's saturation."""

EPILOG = f"""\
examples:
  python scripts/bench_serve.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts prompts.jsonl --json out.json

  a quick look
      --rates 0.5 --seconds 20 --rounds 1 --server-arg=--enforce-eager

{PROMPT_LINES}
  `vllm bench serve` leaves out prompts of more than {MAX_PROMPT_TOKENS} tokens.

what is printed, for each rate:
  TPOT      time per output token of a request, from its first token to its last
  TTFT      time to first token of a request, waiting included
  tokens/s  emitted tokens over the time from the first request to the end of the last answer
  ratio     over plain vLLM's (`none`) in the same round
  verdict   better or worse than plain vLLM: the ratio differs from 1 by more than the spread of
            the rounds, from the smallest ratio to the largest. With 3 rounds, noise alone looks
            worse in one figure of 20; with 5 rounds, in one of 300
  Figures are medians of the rounds, with the smallest and the largest in brackets.

how it measures:
  `vllm serve` is started once for each method, and all servers run until the end. They get
  their requests in turn, in alternating order from round to round, so that other load of the
  machine affects them all; the others wait. First, every server answers a closed loop of
  --max-num-seqs clients. Plain vLLM's requests a second in this loop are its saturation, and
  the rates are 0.25, 0.5 and 1 of it. A run lasts about --seconds: `vllm bench serve` sends
  requests as a Poisson process, answered greedily up to the end of sequence or --max-tokens. At
  a rate, all rounds have the same requests at the same times, so that rounds differ only by
  noise.
  Each run has a `cache_salt` of its own: no server uses KV or n-grams of the same request in an
  earlier run. (Suffix decoding ignores the salt: compare with `suffix` in one round only.)
  On CPU, Intel's OpenMP and tcmalloc are preloaded where they are found. The client runs on the
  same machine, and shares its cores.

The exit status is 0 if all runs finished, 1 if a server or a run failed, 2 for wrong options, 130
after Ctrl-C; finished runs are reported in any case.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = engine_parser(__doc__, EPILOG, "none,lookahead")
    add = result.add_argument
    about = "requests a second (default: 0.25, 0.5 and 1 of plain vLLM's saturation)"
    add("--rates", type=numbers, metavar="A,B", help=about)
    add("--rounds", type=positive, default=5, metavar="N", help="default: 5")
    add("--seconds", type=positive, default=45, metavar="N", help="of a run (default: 45)")
    add("--max-num-seqs", type=positive, default=32, metavar="N", help="of a server (default: 32)")
    add(
        "--server-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="a further argument of `vllm serve`, as in --server-arg=--enforce-eager; repeatable",
    )
    return result


def numbers(text: str) -> list[float]:
    """Numbers above 0, separated by commas, in ascending order."""
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not 0 < values[0] <= values[-1] < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers above 0, as in 0.5,1,2"
        )
    return values


def server_command(
    options: argparse.Namespace, config: SpeculativeConfig | None, length: int, port: int
) -> list[str]:
    """The `vllm serve` command of a method."""
    command = ["vllm", "serve", options.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", options.dtype, "--max-model-len", str(length)]
    command += ["--max-num-seqs", str(options.max_num_seqs)]
    if size := kv_cache_bytes(options):
        command += ["--kv-cache-memory-bytes", str(size)]
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    return command + options.server_arg


class ServingBenchmark:
    """All runs of one call, and their results so far."""

    def __init__(
        self,
        options: argparse.Namespace,
        methods: dict[str, SpeculativeConfig | None],
        prompts: Sequence[Prompt],
    ) -> None:
        self.options = options
        self.methods = methods
        self.prompts = [p for p in prompts if len(p.token_ids) <= MAX_PROMPT_TOKENS]
        if not self.prompts:
            raise PromptError(
                f"{options.prompts}: all prompts have over {MAX_PROMPT_TOKENS} tokens"
            )
        self.length = context_length(self.prompts, options.max_tokens, options.model)
        self.folder = Path(tempfile.mkdtemp(prefix="lookahead-bench-serve-"))
        self.requests = self.folder / "requests.json"
        self.closed_loop: dict[str, Latencies] = {}
        self.measured: dict[float, dict[str, list[Latencies]]] = {}
        self.counts: dict[float, int] = {}

    def run(self) -> None:
        """Start the servers, find the rates, and send the requests of all rounds."""
        write_requests(as_texts(self.prompts, self.options.model), self.requests)
        with ExitStack() as stack:
            urls = {}
            for method, config in self.methods.items():
                port = free_port()
                command = server_command(self.options, config, self.length, port)
                log = self.folder / f"{method}.log".replace("/", "_")
                server = serving(command, port, log, engine_environment(self.options))
                urls[method] = stack.enter_context(server)
            print(flush=True)
            self._warm_up(urls)
            self._choose_rates()
            self._send(urls)

    def _warm_up(self, urls: dict[str, str]) -> None:
        """Run the closed loop, which also measures plain vLLM's saturation."""
        clients = self.options.max_num_seqs
        load = Load(min(len(self.prompts), 2 * clients), concurrency=clients)
        for method, url in tqdm(urls.items(), desc="closed loop", unit="server"):
            self.closed_loop[method] = self._bench(url, load, "closed-loop")

    def _choose_rates(self) -> None:
        rates = self.options.rates
        if not rates:
            saturation = self.closed_loop[BASELINE]["requests_per_s"]
            rates = [load * saturation for load in LOADS]
        for rate in rates:
            wanted = max(round(rate * self.options.seconds), 2)
            self.counts[rate] = min(wanted, len(self.prompts))
            self.measured[rate] = {method: [] for method in self.methods}
            if wanted > len(self.prompts):
                seconds = len(self.prompts) / rate
                print(f"at {rate:.2f}/s the {len(self.prompts)} prompts last for {seconds:.0f} s")

    def _send(self, urls: dict[str, str]) -> None:
        total = self.options.rounds * len(self.measured) * len(urls)
        with tqdm(total=total, unit="run") as bar:
            for number in range(self.options.rounds):
                for seed, (rate, count) in enumerate(self.counts.items(), start=1):
                    load = Load(count, rate=rate, seed=seed)
                    for method in list(urls)[:: -1 if number % 2 else 1]:
                        name = f"round {number + 1}/{self.options.rounds}, {rate:.2f}/s, {method}"
                        bar.set_description(name)
                        salt = f"round {number + 1}, rate {seed}"
                        latencies = self._bench(urls[method], load, salt)
                        self.measured[rate][method].append(latencies)
                        bar.update()

    def _bench(self, url: str, load: Load, salt: str) -> Latencies:
        log = self.folder / "client.log"
        options = self.options
        return bench_serve(url, options.model, self.requests, load, options.max_tokens, salt, log)

    def finished(self) -> Measured:
        """The rates with at least one finished run."""
        return {rate: rounds for rate, rounds in self.measured.items() if any(rounds.values())}

    def content(self, argv: Sequence[str]) -> dict[str, Any]:
        """The JSON: all results, and what is needed to repeat the benchmark."""
        return {
            "meta": {
                "model": self.options.model,
                "dtype": self.options.dtype,
                "versions": versions(),
                "cpu": cpu_name(),
                "cores": os.cpu_count(),
                "prompts": {"file": str(self.options.prompts), "count": len(self.prompts)},
                "max_tokens": self.options.max_tokens,
                "max_num_seqs": self.options.max_num_seqs,
                "rounds": self.options.rounds,
                "methods": self.methods,
                "argv": list(argv),
            },
            "closed_loop": self.closed_loop,
            "rates": [
                {"requests_per_s": rate, "requests": self.counts[rate], "rounds": rounds}
                for rate, rounds in self.finished().items()
            ],
        }


def report(benchmark: ServingBenchmark, argv: Sequence[str]) -> None:
    """Print the table of the finished runs; write the JSON."""
    options, measured = benchmark.options, benchmark.finished()
    if measured:
        _print(benchmark, measured)
    if options.json:
        options.json.write_text(json.dumps(benchmark.content(argv), indent=1) + "\n")


def _print(benchmark: ServingBenchmark, measured: Measured) -> None:
    options = benchmark.options
    counts = ", ".join(f"{benchmark.counts[rate]} at {rate:.2f}/s" for rate in measured)
    title = f"{Path(options.model).name}, {options.dtype}, {cpu_name()}"
    print(f"\n{title} ({os.cpu_count()} cores); requests: {counts}; {options.rounds} rounds")
    for method, loop in benchmark.closed_loop.items():
        print(
            f"closed loop of {options.max_num_seqs}, {method}: {loop['requests_per_s']:.2f} "
            f"requests/s, {loop['tokens_per_s']:.1f} tokens/s"
        )
    print(f"\n{table(measured)}\n")


def prepare(options: argparse.Namespace) -> ServingBenchmark:
    """Check everything that can be checked before the first server starts."""
    methods = choose_methods(options.methods, options.config)
    if BASELINE not in methods:
        raise MethodError(f"servers are compared with `{BASELINE}`: add it to --methods")
    check_outputs(options, MethodError)
    prompts = load_prompts(options.prompts, model_tokenizer(options.model))
    return ServingBenchmark(options, methods, prompts)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; the exit status is explained in `--help`."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        benchmark = prepare(options)
    except (MethodError, PromptError) as error:
        arguments.error(str(error))
    try:
        status = 130 if interrupted(benchmark.run) else 0
    except (ServerError, LoadFailed) as error:
        status = 1
        print(f"\nfailed: {error}\nall logs are in {benchmark.folder}", file=sys.stderr)
    report(benchmark, argv)
    if status == 0:
        shutil.rmtree(benchmark.folder, ignore_errors=True)
    return status
