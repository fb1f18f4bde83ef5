"""Measure a server's start, from the command to the first answer, with and without lookahead."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tqdm import tqdm

from benchmarks.command_line import interrupted
from benchmarks.methods import BASELINE, MethodError, SpeculativeConfig, choose_methods
from benchmarks.serving.server import ServerError, free_port, serving
from benchmarks.start.phases import ENDS, FIRST_ANSWER, LogFollower, durations
from lookahead_vllm.cli.arguments import check_output, positive
from lookahead_vllm.machine import cpu_name, versions
from lookahead_vllm.simulation.markdown import MISSING, markdown, number

EPILOG = """\
example:
  scripts/cpu_env.sh .venv/bin/python scripts/bench_start.py \\
      --model .cache/models/SmolLM2-135M-Instruct --times 5

phases, each up to a line of vLLM's log (seconds, medians):
  command                 the command's imports and arguments, up to `non-default args`
  config, engine process  checks of the configuration, a new process with its imports
  worker process          the same of the worker
  load model              the weights
  compile, warm up        torch.compile, the first pass
  cost of a step          only lookahead has it: passes that measure it, or a file that has it
  proposer                only lookahead has it: its kernels, its memory and its cache file
  rest of engine          the KV cache and what is left of the engine's start
  HTTP                    up to `Application startup complete`
  first answer            one token, from the request to the answer
  A phase whose line is missing is part of the next one.

how it measures:
  Each start is a `vllm serve` of its own. Cold starts have empty folders for everything that vLLM,
  torch and lookahead keep: compiled code and the cost of a step. Warm starts use the folders of
  the last cold one. In each of --times rounds every method starts cold and then warm, in
  alternating order. The operating system's page cache is warm after an unmeasured first start.
  Compare on a quiet machine.
"""

COLD, WARM = "cold", "warm"
Starts = dict[tuple[str, str], list[dict[str, float]]]
"""By method and by cold or warm: the seconds of the phases of each start."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--model", required=True, metavar="DIR", help="the model's folder, with a tokenizer")
    add("--methods", default="none,lookahead", metavar="A,B", help="default: none,lookahead")
    add(
        "--config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="also start with this `speculative_config`, as a method of that name; repeatable",
    )
    add("--times", type=positive, default=3, metavar="N", help="rounds (default: 3)")
    add(
        "--warm-only", action="store_true", help="no cold starts but the first, which is unmeasured"
    )
    add("--server-arg", action="append", default=[], metavar="ARG", help="also of `vllm serve`")
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    return result


def environment(folder: Path) -> dict[str, str]:
    """Variables with which a server keeps all compiled code and measurements in `folder`."""
    return {
        "XDG_CACHE_HOME": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "LOOKAHEAD_VLLM_CACHE": str(folder / "lookahead"),
    }


def start(
    options: argparse.Namespace, config: SpeculativeConfig | None, cache: Path
) -> dict[str, float]:
    """Start a server, answer one request, and stop it; returns the seconds of the phases.

    Raises ServerError if it does not start.
    """
    port = free_port()
    command = ["vllm", "serve", options.model, "--served-model-name", "m", "--port", str(port)]
    command += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 30)]
    if config:
        command += ["--speculative-config", json.dumps(config)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        begin = time.monotonic()
        with (
            LogFollower(log) as follower,
            serving([*command, *options.server_arg], port, log, environment(cache)) as url,
        ):
            body = {"model": "m", "prompt": "Hello", "max_tokens": 1}
            asked = time.monotonic()
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=600) as response:
                response.read()
            answered = time.monotonic() - asked
        return {**durations(begin, follower.ends), FIRST_ANSWER: answered}


def run(
    options: argparse.Namespace, methods: dict[str, SpeculativeConfig | None], starts: Starts
) -> None:
    """All starts; fills `starts`."""
    cold_starts = 1 if options.warm_only else options.times
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=1 + len(methods) * (options.times + cold_starts), desc="Starts") as bar,
    ):

        def measure(name: str, cache: Path) -> dict[str, float]:
            measured = start(options, methods[name], cache)
            bar.update()
            return measured

        start(options, None, Path(folder))  # reads all files once
        bar.update()
        for number in range(options.times):
            for name in list(methods)[:: -1 if number % 2 else 1]:
                cold = not options.warm_only
                cache = Path(folder) / f"{name}-{number if cold else 0}".replace("/", "_")
                if not cache.exists():
                    cache.mkdir()
                    measured = measure(name, cache)
                    if cold:
                        starts.setdefault((name, COLD), []).append(measured)
                starts.setdefault((name, WARM), []).append(measure(name, cache))


def table(starts: Starts) -> str:
    """One column for each method, cold and warm; a row for each phase, and for the whole."""
    columns = sorted(starts, key=lambda column: column[1])

    def cell(values: Sequence[float]) -> str:
        if not values:
            return MISSING
        spread = f" ({number(min(values), 1)}–{number(max(values), 1)})" if len(values) > 1 else ""
        return number(median(values), 1) + spread

    body = [
        [phase, *(cell([s[phase] for s in starts[c] if phase in s]) for c in columns)]
        for phase in [*ENDS, FIRST_ANSWER]
    ]
    body.append(["whole", *(cell([sum(s.values()) for s in starts[c]]) for c in columns)])
    return markdown(["seconds", *(f"{name}, {kind}" for name, kind in columns)], body)


def additions(starts: Starts) -> str:
    """What each method adds to plain vLLM's start, a line for each; "" without plain vLLM."""
    lines = []
    for (name, kind), measured in starts.items():
        plain = starts.get((BASELINE, kind))
        if plain and name != BASELINE:
            pairs = zip(measured, plain, strict=False)
            added = [sum(one.values()) - sum(other.values()) for one, other in pairs]
            lines.append(
                f"{name}, {kind}: {median(added):+.1f} s "
                f"({min(added):+.1f} to {max(added):+.1f} in {len(added)} rounds)"
            )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measure, print the tables; 1 if a server did not start, 2 for wrong options, 130 if cut."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        methods = choose_methods(options.methods, options.config)
        if options.json:
            check_output(options.json, MethodError)
    except MethodError as error:
        arguments.error(str(error))
    starts: Starts = {}
    try:
        status = 130 if interrupted(lambda: run(options, methods, starts)) else 0
    except ServerError as error:
        print(error, file=sys.stderr)
        status = 1
    if starts:
        print(
            f"\n{Path(options.model).name}, {cpu_name()}\n\n{table(starts)}\n\n{additions(starts)}"
        )
    if options.json:
        rows = [{"method": n, "kind": k, "starts": s} for (n, k), s in starts.items()]
        meta = {"versions": versions(), "cpu": cpu_name(), "argv": list(argv)}
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return status
