"""Compare proposers without a model: recorded generations replayed as the engine would."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookahead_vllm.cli.arguments import check_output, positive
from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.machine import versions
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
from lookahead_vllm.simulation.traces import TraceError, TraceFile, load_traces

EPILOG = """\
example:
  lookahead-vllm simulate --traces *_reference.jsonl \\
      --proposers ngram_trie,prompt_lookup,suffix --budget 16,32 --mode cold,replay \\
      --json out.json

a line of the traces:
  {"prompt_token_ids": [1, 9690, ...], "output_token_ids": [504, ...],
   "suite": "spec_bench", "category": "qa", "loops": false}
  The last three may be missing.

proposers:
%s
  Settings make another proposer: ngram_trie:branch_length=8:max_nodes=50000,
  suffix:max_tree_depth=64, prompt_lookup:prompt_lookup_min=3.
  hybrid and jacobi_window learn from the model's choices, which a recording does not have.

modes:
  cold    all traces of a file, in order, starting with an empty cache
  replay  all traces of a file, after all of them were played once (as new requests)
  Each file has its own cache; the overall figures pool the steps of all files.

columns:
  budget      the maximum of nodes in a tree
  EDL         tokens that a decode step emits, mean: the accepted nodes and the model's own next
              token; steps without a draft count
  nodes       draft tokens per decode step
  propose µs  one call of `propose`: median and 99th percentile
  update µs   one call of `extend` divided by the number of its tokens: median
  speed-up    with --cost-curve: tokens * t(1), divided by the sum of t(1 + nodes) over all steps
  The JSON has these and more as results[proposer][budget][mode] = {edl, nodes,
  propose_us_p50, propose_us_p99, update_us_p50, by_category, by_file, ...}.

method:
  Requests run one at a time. The prefill produces the first output token, so that token is no
  decode step. A step proposes a tree, accepts its longest path that agrees with the recorded
  output, and commits that path and one more token. The remaining recorded output bounds the depth:
  deeper nodes of any proposer are not sent. Times are those of the proposer's calls, in this
  process, with garbage collection off, after a warm-up on another instance; those of prompt_lookup
  are of a NumPy version of vLLM's kernel.

The exit status is 0, 2 for wrong options or traces, 130 after Ctrl-C.
"""


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
    add(
        "--budget",
        type=budgets,
        default=[8, 16, 32, 64],
        metavar="N,M",
        help="maximum of nodes in a tree, 1 to 128 (default: 8,16,32,64)",
    )
    add("--mode", type=modes, default=["cold"], metavar="A,B", help="default: cold; see below")
    add("--limit", type=positive, metavar="N", help="the first N traces of each file")
    add("--shuffle", type=int, metavar="SEED", help="shuffle the traces of each file first")
    add(
        "--no-loops",
        action="store_true",
        help="first leave out traces with `loops: true`, whose answers repeat without end",
    )
    add(
        "--cost-curve",
        type=cost_curve,
        metavar="TOKENS:MS,...",
        help="cost of a step by its tokens, as in 1:25,8:32.4,32:73.5: proposers of this package "
        "then send only nodes that are worth their cost, and the speed-up is computed",
    )
    add("--json", type=Path, metavar="OUT.json", help="write all results to this file")
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
        if options.json:
            check_output(options.json, OptionError)
        self.options = options
        names = default_proposers() if options.proposers is None else options.proposers
        self.makers: dict[str, Make] = choose_drafters(names)
        self.files: list[TraceFile] = [
            load_traces(path, options.limit, options.shuffle, options.no_loops)
            for path in dict.fromkeys(options.traces)
        ]
        self.results: Results = {}
        self.complete = False

    def run(self) -> None:
        """Replay every file with every proposer and budget."""
        tokens = sum(file.num_tokens for file in self.files) * passes(self.options.mode)
        runs = [(name, budget) for name in self.makers for budget in self.options.budget]
        form = "{desc} |{bar}| {percentage:3.0f} %, {elapsed}, {remaining} left"
        with tqdm(total=tokens * len(runs), bar_format=form) as bar:
            for name, budget in runs:
                bar.set_description(f"{name}, {budget}")
                curve = self.options.cost_curve
                self.results.setdefault(name, {})[str(budget)] = simulate(
                    partial(self.makers[name], budget, curve),
                    budget,
                    self.files,
                    self.options.mode,
                    curve=curve,
                    advance=bar.update,
                )
        self.complete = True

    def meta(self, argv: Sequence[str]) -> dict[str, Any]:
        """Versions, inputs and arguments: what it takes to repeat this run."""
        return {
            "versions": versions(),
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
    """Write the JSON of the finished runs, and print their tables."""
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
