"""Compare servers under load: requests arrive at random, and wait for what others are answered."""

from __future__ import annotations

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
    LONGEST_PROMPT,
    Latencies,
    Load,
    LoadFailed,
    bench_serve,
    write_requests,
)
from benchmarks.serving.latencies import Measured, conclusion, plot, table
from benchmarks.serving.server import ServerError, free_port, serving
from lookahead_vllm.cli.arguments import check_outputs, positive
from lookahead_vllm.machine import cpu_name, versions

EPILOG = f"""\
examples:
  python scripts/bench_serve.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts prompts.jsonl --json out.json --plot out.png

  a quick look
      --rates 0.5 --seconds 20 --rounds 1 --server-arg=--enforce-eager

{PROMPT_LINES}
  `vllm bench serve` leaves out prompts of more than {LONGEST_PROMPT} tokens.

what is printed, for each rate:
  TPOT      time per output token of a request, from its first token to its last
  TTFT      time to first token of a request, waiting included
  tokens/s  emitted tokens over the time from the first request to the end of the last answer
  ratio     over plain vLLM's (`none`) in the same round
  verdict   better or worse than plain vLLM: the ratio is off 1 by more than the spread of the
            rounds, from the least ratio to the largest. Noise alone looks worse in one figure
            of 20 with 3 rounds, of 300 with 5
  Figures are medians of the rounds; in brackets from where to where these went.

how it measures:
  `vllm serve` is started once for each method, and all servers live until the end. They are
  asked in turn, every other round in the other order, so that whatever else the machine does
  reaches all of them; the others wait. Before, every server answers a closed loop of
  --max-num-seqs clients; what plain vLLM answers a second there is taken for its saturation,
  and --loads are shares of it. A run lasts about --seconds: so many requests arrive, as a
  Poisson process, through `vllm bench serve`, and are answered greedily up to the end of
  sequence or --max-tokens. At a rate every round has the same requests at the same times, so
  that rounds differ by noise alone.
  Each run has a `cache_salt` of its own. So no server profits from having answered the same
  request in an earlier run, neither by its KV nor by lookahead's n-grams. (Suffix decoding does
  not heed it: compare with `suffix` in one round only.)
  On CPU, Intel's OpenMP and tcmalloc are preloaded where they are found. The client runs on the
  same machine, and shares its cores.

The exit status is 0 if all runs finished, 1 if a server or a run failed, 2 for wrong options, 130
after Ctrl-C; what has finished is reported in any case.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = engine_parser(__doc__, EPILOG, "none,lookahead")
    add = result.add_argument
    add("--rates", type=numbers, metavar="A,B", help="requests a second (default: see --loads)")
    add(
        "--loads",
        type=numbers,
        default=[0.25, 0.5, 1.0],
        metavar="A,B",
        help="shares of plain vLLM's saturation (default: 0.25,0.5,1)",
    )
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
    """Numbers above 0, separated by commas, the least first."""
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not 0 < found[0] <= found[-1] < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers above 0, as in 0.5,1,2"
        )
    return found


def server_command(
    options: argparse.Namespace, config: SpeculativeConfig | None, length: int, port: int
) -> list[str]:
    """The `vllm serve` of a method."""
    command = ["vllm", "serve", options.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", options.dtype, "--max-model-len", str(length)]
    command += ["--max-num-seqs", str(options.max_num_seqs)]
    if size := kv_cache_bytes(options):
        command += ["--kv-cache-memory-bytes", str(size)]
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    return command + options.server_arg


class ServingBenchmark:
    """All runs of one call, and what has come of them so far."""

    def __init__(
        self,
        options: argparse.Namespace,
        methods: dict[str, SpeculativeConfig | None],
        prompts: Sequence[Prompt],
    ) -> None:
        self.options = options
        self.methods = methods
        self.prompts = [p for p in prompts if len(p.token_ids) <= LONGEST_PROMPT]
        if not self.prompts:
            raise PromptError(f"{options.prompts}: all prompts have over {LONGEST_PROMPT} tokens")
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
        """The closed loop, which also finds plain vLLM's saturation."""
        most = self.options.max_num_seqs
        load = Load(min(len(self.prompts), 2 * most), concurrency=most)
        for method, url in tqdm(urls.items(), desc="closed loop", unit="server"):
            self.closed_loop[method] = self._bench(url, load, "closed-loop")

    def _choose_rates(self) -> None:
        rates = self.options.rates
        if not rates:
            saturation = self.closed_loop[BASELINE]["requests_per_s"]
            rates = [load * saturation for load in self.options.loads]
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
        """The rates at which a run has ended."""
        return {rate: rounds for rate, rounds in self.measured.items() if any(rounds.values())}

    def content(self, argv: Sequence[str]) -> dict[str, Any]:
        """All that was measured, and what there is to know to repeat it."""
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
    """Print the table of what is finished; write the JSON and the picture."""
    options, measured = benchmark.options, benchmark.finished()
    if options.json:
        options.json.write_text(json.dumps(benchmark.content(argv), indent=1) + "\n")
    if not measured:
        return
    counts = ", ".join(f"{benchmark.counts[rate]} at {rate:.2f}/s" for rate in measured)
    title = f"{Path(options.model).name}, {options.dtype}, {cpu_name()}"
    print(f"\n{title} ({os.cpu_count()} cores); requests: {counts}; {options.rounds} rounds")
    for method, loop in benchmark.closed_loop.items():
        print(
            f"closed loop of {options.max_num_seqs}, {method}: {loop['requests_per_s']:.2f} "
            f"requests/s, {loop['tokens_per_s']:.1f} tokens/s"
        )
    print(f"\n{table(measured)}\n")
    for sentence in conclusion(measured):
        print(sentence)
    if options.plot:
        plot(measured, options.plot, title)


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
