"""Compare proposers without a model: recorded generations replayed as the engine would."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookahead_vllm.cli.arguments import check_outputs, positive
from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.draft.trie.recycling import NUM_CHOICES
from lookahead_vllm.simulation.choices import with_choices
from lookahead_vllm.simulation.drafters import Make, choose_drafters, describe
from lookahead_vllm.simulation.replay import MODES, Mode, passes, simulate
from lookahead_vllm.simulation.rivals import has_arctic_inference
from lookahead_vllm.simulation.tables import (
    Results,
    by_category,
    by_file,
    overall_table,
    parts_table,
)
from lookahead_vllm.simulation.traces import Trace, TraceError, TraceFile, load_traces, resample

EPILOG = """\
example:
  lookahead-vllm simulate --traces *_reference.jsonl \\
      --proposers ngram_trie,prompt_lookup,suffix --budget 16,32 --mode cold,replay \\
      --json out.json --plot out.png

a line of the traces:
  {"prompt_token_ids": [1, 9690, ...], "output_token_ids": [504, ...],
   "suite": "spec_bench", "category": "qa", "loops": false}
  The last three may be missing.

proposers, as --list prints them:
%s
  Settings make another proposer: ngram_trie:branch_length=8:max_nodes=50000,
  suffix:max_tree_depth=64, prompt_lookup:prompt_lookup_min=3.
  hybrid learns from the model's choices at the roots and at the accepted nodes. The choices at
  rejected nodes were not recorded, so it recycles fewer than in an engine, and the cells of its
  window cannot be replayed. Its EDL here is a lower bound of what it recycles.

modes:
  cold    all traces of a file, in order, starting with an empty cache
  warm    the traces of the file's second half, after those of its first half
  replay  all traces of a file, after all of them were played once (as new requests)
  Each file has its own cache; the overall figures pool the steps of all files.

columns:
  budget      the maximum of nodes in a tree
  EDL         tokens that a decode step emits, mean: the accepted nodes and the model's own next
              token; steps without a draft count
  nodes       draft tokens per decode step
  propose µs  one call of `propose`: median and 99th percentile
  update µs   one call of `extend` (and of `observe`), divided by the number of its tokens: median
  MB          bytes held after the file was played; the maximum over the files. For proposers of
              this package, the size that they report for their caches. For suffix, the bytes that
              malloc gets back when the cache is freed (measured in a fork, headers included), or,
              where malloc does not report it, arctic-inference's own estimate. prompt_lookup
              stores nothing
  bytes/token with --fill: bytes held after the generated answers, divided by their tokens
  speed-up    with --cost-curve: tokens * t(1), divided by the sum of t(1 + nodes) over all steps
  The JSON has these and more as results[proposer][budget][mode] = {edl, nodes,
  propose_us_p50, propose_us_p99, update_us_p50, bytes, by_category, by_file, ...}.

method:
  Requests run one at a time. The prefill produces the first output token, so that token is no
  decode step. A step proposes a tree, accepts its longest path that agrees with the recorded
  output, and commits that path and one more token. The remaining recorded output bounds the depth:
  deeper nodes of any proposer are not sent. Times are those of the proposer's calls, in this
  process, with garbage collection off, after a warm-up on another instance; those of prompt_lookup
  are of a NumPy version of vLLM's kernel.
  --fill generates answers of 200 to 300 tokens, with prompts of 50, from the outputs of all files:
  each token is one that follows the last two somewhere in them, drawn with a fixed seed. Every
  cache learns them first. suffix forgets requests above max_cached_requests and ngram_trie nodes
  above max_nodes, which lowers bytes/token. Use it for times and bytes only: the EDL after it
  means little, because the answers are made of the traces.

The exit status is 0, 2 for wrong options or traces, 130 after Ctrl-C.
"""


class ListProposers(argparse.Action):
    """`--list`: print the proposers and exit."""

    def __call__(self, arguments: argparse.ArgumentParser, *args: Any) -> None:
        print(describe())
        arguments.exit()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    listed = "\n".join(f"  {line}" for line in describe().splitlines())
    result = argparse.ArgumentParser(
        prog="lookahead-vllm simulate",
        description=__doc__,
        epilog=EPILOG.replace("%s", listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--traces", required=True, nargs="+", type=Path, metavar="FILE.jsonl", help="see below")
    add(
        "--proposers",
        metavar="A,B",
        help="default: ngram_trie,prompt_lookup,suffix; suffix only where arctic-inference is "
        "installed",
    )
    add("--list", nargs=0, action=ListProposers, help="print the proposers and exit")
    add(
        "--budget",
        type=budgets,
        default=[8, 16, 32, 64],
        metavar="N,M",
        help="maximum of nodes in a tree, 1 to 128 (default: 8,16,32,64)",
    )
    add(
        "--choices",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE.npz",
        help="NAME.choices.npz for each NAME.jsonl: what scripts/record_choices.py has recorded",
    )
    add("--mode", type=modes, default=["cold"], metavar="A,B", help="default: cold; see below")
    add("--limit", type=positive, metavar="N", help="the first N traces of each file")
    add("--shuffle", type=int, metavar="SEED", help="shuffle the traces of each file first")
    add(
        "--no-loops",
        action="store_true",
        help="first leave out traces with `loops: true`, whose answers repeat without end",
    )
    add("--fill", type=positive, metavar="N", help="first fill every cache with N generated tokens")
    add(
        "--cost-curve",
        type=cost_curve,
        metavar="TOKENS:MS,...",
        help="cost of a step by its tokens, as in 1:25,8:32.4,32:73.5: proposers of this package "
        "then send only nodes that are worth their cost, and the speed-up is computed",
    )
    add("--json", type=Path, metavar="OUT.json", help="write all results to this file")
    add("--plot", type=Path, metavar="OUT.png", help="plot EDL over nodes")
    return result


def budgets(text: str) -> list[int]:
    """Numbers from 1 to 128, separated by commas; duplicates are dropped."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or not 1 <= int(part) <= 128:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number from 1 to 128")
    return list(dict.fromkeys(map(int, parts)))


def modes(text: str) -> list[Mode]:
    """Modes, separated by commas, in the order of MODES."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in MODES:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(MODES)}")
    return [mode for mode in MODES if mode in parts]


def cost_curve(text: str) -> CostCurve:
    """`TOKENS:MS` pairs, separated by commas."""
    try:
        points = [part.split(":") for part in text.split(",")]
        return CostCurve([int(size) for size, _ in points], [float(ms) for _, ms in points])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not TOKENS:MS,... with rising tokens and times above 0, as in 1:25,8:32.4"
        ) from None


def default_proposers() -> str:
    """The value of --proposers if it is not given; prints a note if suffix is left out."""
    if has_arctic_inference():
        return "ngram_trie,prompt_lookup,suffix"
    print(
        "note: suffix is left out, because arctic-inference is not installed; scripts/setup.sh "
        "--bench installs it",
        file=sys.stderr,
    )
    return "ngram_trie,prompt_lookup"


class Simulation:
    """The proposers and traces of one call, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        check_outputs(options, OptionError)
        self.options = options
        names = default_proposers() if options.proposers is None else options.proposers
        self.makers: dict[str, Make] = choose_drafters(names, bool(options.choices))
        self.files: list[TraceFile] = [
            load_traces(path, options.limit, options.shuffle, options.no_loops)
            for path in dict.fromkeys(options.traces)
        ]
        if options.choices:
            self.files = [with_choices(file, options.choices, NUM_CHOICES) for file in self.files]
        self.results: Results = {}
        self.complete = False

    def run(self) -> None:
        """Replay every file with every proposer and budget."""
        filled = self.options.fill or 0
        tokens = sum(file.num_tokens for file in self.files) * passes(self.options.mode)
        tokens += filled * len(self.files)
        runs = [(name, budget) for name in self.makers for budget in self.options.budget]
        form = "{desc} |{bar}| {percentage:3.0f} %, {elapsed}, {remaining} left"
        tqdm.monitor_interval = 0  # no thread, because measuring memory forks
        with tqdm(total=filled + tokens * len(runs), bar_format=form) as bar:
            bar.set_description("generating answers" if filled else "starting")
            filling = self._filling(bar)
            for name, budget in runs:
                bar.set_description(f"{name}, {budget}")
                curve = self.options.cost_curve
                self.results.setdefault(name, {})[str(budget)] = simulate(
                    partial(self.makers[name], budget, curve),
                    budget,
                    self.files,
                    self.options.mode,
                    curve=curve,
                    filling=filling,
                    advance=bar.update,
                )
        self.complete = True

    def _filling(self, bar: Any) -> list[Trace]:
        traces = [trace for file in self.files for trace in file.traces]
        return resample(traces, self.options.fill or 0, advance=bar.update)

    def meta(self, argv: Sequence[str]) -> dict[str, Any]:
        """Versions, inputs and arguments: what it takes to repeat this run."""
        names = ("lookahead-vllm", "arctic-inference", "numpy", "numba")
        found = {}
        for name in names:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return {
            "versions": found,
            "files": {
                str(file.path): {
                    "traces": len(file.traces),
                    "tokens": file.num_tokens,
                    "too_short": file.too_short,
                }
                for file in self.files
            },
            "argv": list(argv),
            "complete": self.complete,
        }


def report(simulation: Simulation, argv: Sequence[str]) -> None:
    """Write the JSON of the finished runs, print their tables, and draw the plot."""
    options, results = simulation.options, simulation.results
    if results and options.json:
        content = {"meta": simulation.meta(argv), "results": results}
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    for file in simulation.files:
        short = f", {file.too_short} shorter than two tokens left out" if file.too_short else ""
        print(f"{file.path}: {len(file.traces)} traces, {file.num_tokens} tokens{short}")
    if not results:
        return
    tables = [
        overall_table(results),
        parts_table(results, "EDL (nodes)", by_file),
        parts_table(results, "EDL (nodes)", by_category),
    ]
    for table in filter(None, tables):
        print(f"\n{table}")
    if options.plot:
        from lookahead_vllm.simulation.plot import plot

        plot(results, options.plot)


def main(argv: Sequence[str]) -> int:
    """Run the simulation; `--help` explains the exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        simulation = Simulation(options)
    except (OptionError, TraceError) as error:
        arguments.error(str(error))
    interrupted = False
    try:
        simulation.run()
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted; these runs had finished", file=sys.stderr)
    report(simulation, argv)
    return 130 if interrupted else 0
