"""Compare proposers without a model: recorded generations replayed as the engine would."""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path

from lookahead_vllm.cli.arguments import above_zero, check_output, positive
from lookahead_vllm.cli.cache import check_model, load_renderer
from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.machine import versions
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.simulation import plot
from lookahead_vllm.simulation.proposers import NAMES, Make, choose_proposers
from lookahead_vllm.simulation.replay import MODES, Mode, Pace, simulate
from lookahead_vllm.simulation.tables import Results, by_file, overall_table, parts_table
from lookahead_vllm.simulation.traces import TraceError, TraceFile, load_traces

EPILOG = """\
examples:
  lookahead-vllm simulate tests/data/agents.jsonl --proposers ngram_trie,ngram
  lookahead-vllm simulate LOGS --model MODEL --concurrent 8 --plot out.png
  lookahead-vllm simulate *_reference.jsonl --proposers ngram_trie,ngram_trie:max_nodes=50000 \\
      --budget 16,32 --mode cold,replay --json out.json

a line of token ids:
  {"prompt_token_ids": [1, 9690, ...], "output_token_ids": [504, ...],
   "suite": "spec_bench", "category": "qa", "loops": false, "chains": [...]}
  The last four may be missing. `chains` has what a trained drafter proposed after each output
  token.

a line with a session, for agents and chats:
  {"turns": [{"prompt_token_ids": [...], "output_token_ids": [...]}, ...], "suite": ...}
  The prompt of a turn is all turns before it and its own `prompt_token_ids`. A turn begins when the
  one before has ended.

a line of text, with --model:
  {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
  as in requests to a server's chat endpoint: each answer in it is a turn. In a log with a line for
  each request, only the last one of each conversation counts, with the answers that it has.
  `lookahead-vllm cache build --help` shows the other lines of text.
  All .jsonl files below a folder count as one file.

proposers:
  ngram_trie, with the options of a server, as in ngram_trie:max_nodes=50000.
  ngram_trie:drafter=4 has the first four tokens of the recorded chains in its trees.
  hybrid and jacobi_window learn from the model's choices, which a recording does not have.
  ngram is vLLM's, with n-grams of 2 to 5. suffix is vLLM's, by arctic-inference, with vLLM's
  defaults; suffix_trees are the same library's trees, which vLLM does not use; suffix_v2 is vLLM's
  `suffix` for Model Runner V2, after 0.33, whose chains all have --budget tokens.
  All insert prompts at once, and send their drafts whatever they cost.

modes:
  cold    all answers of a file, in order, starting with an empty cache
  replay  all answers of a file, after all of them were played once (as new requests)
  Each file has its own cache; the overall figures pool the steps of all files.

columns:
  budget      the maximum of nodes in a tree
  EDL         tokens that a decode step emits, mean: the accepted nodes and the model's own next
              token; steps without a draft count
  nodes       draft tokens per decode step
  propose µs  the trees of a step, divided by its requests: median and 99th percentile
  update µs   learning from a step's tokens, divided by their number: median
  speed-up    with --cost-curve: tokens * t(1), divided by the sum of t(1 + nodes) over all steps
  The JSON has these and more as results[proposer][budget][mode] = {edl, nodes,
  propose_us_p50, propose_us_p99, update_us_p50, by_category, by_file, by_turn, ...}.

method:
  --concurrent sessions run at a time, and a new one begins when one ends. A step reads 8192 tokens
  of prompts, one after another, without what a session's last turn has left in the prefix cache;
  the end of a prompt produces the first output token. A step proposes a tree, accepts its longest
  path that agrees with the recorded output, and commits that path and one more token. The remaining
  recorded output bounds the depth: deeper nodes are not sent.
  Prompts are inserted as in an engine, with 0.7 µs a token: while the worker waits for the device,
  which is 40 % of a step of --step-ms, and for 1/32 of each step. A step that reads a prompt counts
  as long as any other, and sends as many nodes; in an engine, it takes longer and sends hardly any,
  because the prompt leaves no room. With `--insertion all`, each prompt is inserted at once, which
  no engine does. Times are those of the proposer's calls, in this process, with garbage collection
  off, after a warm-up on another instance; nothing else depends on them.

The exit status is 0, 2 for wrong options or files, 130 after Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="lookahead-vllm simulate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("files", nargs="*", type=Path, metavar="FILE.jsonl", help="or folders; see below")
    add("--traces", nargs="+", type=Path, default=[], metavar="FILE.jsonl", help="the same")
    add("--model", help="for lines of text: as for vllm serve; only its tokenizer is loaded")
    add("--proposers", default=NAMES[0], metavar="A,B", help=f"default: {NAMES[0]}; see below")
    add(
        "--budget",
        type=budgets,
        default=[8, 16, 32, 64],
        metavar="N,M",
        help="maximum of nodes in a tree, 1 to 128 (default: 8,16,32,64)",
    )
    add("--mode", type=modes, default=["cold"], metavar="A,B", help="default: cold; see below")
    add(
        "--concurrent",
        type=positive,
        default=1,
        metavar="N",
        help="sessions that run at a time (default: 1)",
    )
    add(
        "--step-ms",
        type=above_zero,
        default=8.0,
        metavar="MS",
        help="length of a step, in which prompts are inserted (default: 8)",
    )
    add(
        "--insertion",
        choices=["engine", "all"],
        default="engine",
        help="of prompts: as in an engine, or all at once (default: engine)",
    )
    add("--limit", type=positive, metavar="N", help="the first N answers of each file")
    add(
        "--no-loops",
        action="store_true",
        help="first leave out lines with `loops: true`, whose answers repeat without end",
    )
    add(
        "--cost-curve",
        type=cost_curve,
        metavar="TOKENS:MS,...",
        help="cost of a step by its tokens, as in 1:25,8:32.4,32:73.5: proposers then "
        "send only nodes that are worth their cost, and the speed-up is computed",
    )
    add("--json", type=Path, metavar="OUT.json", help="write all results to this file")
    add("--plot", type=Path, metavar="OUT.png", help="draw tokens a step by budget and category")
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


def run(
    options: argparse.Namespace, makers: Mapping[str, Make], files: Sequence[TraceFile]
) -> Results:
    """Replay every file with every proposer and budget."""
    curve = options.cost_curve
    at_once = options.insertion == "all"
    pace = Pace(options.concurrent, None if at_once else options.step_ms / 1000)
    longest = max(len(one.prompt) + len(one.output) for file in files for one in file.traces)
    num_tokens = options.concurrent * longest
    return {
        name: {
            str(budget): simulate(
                partial(make, budget, curve, num_tokens), budget, files, options.mode, curve, pace
            )
            for budget in options.budget
        }
        for name, make in makers.items()
    }


def report(results: Results, files: Sequence[TraceFile]) -> None:
    """Print the files and the tables."""
    for file in files:
        short = f", {file.too_short} shorter than two tokens left out" if file.too_short else ""
        print(f"{file.path}: {len(file.traces)} answers, {file.num_tokens} tokens{short}")
    parts = by_file, itemgetter("by_category"), itemgetter("by_turn")
    tables = [overall_table(results), *(parts_table(results, "EDL (nodes)", of) for of in parts)]
    for table in filter(None, tables):
        print(f"\n{table}")


def main(argv: Sequence[str]) -> int:
    """Run the simulation; `--help` explains the exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    paths = dict.fromkeys([*options.files, *options.traces])
    try:
        if not paths:
            raise OptionError("name a file of recorded answers, as in tests/data/agents.jsonl")
        for output in filter(None, (options.json, options.plot)):
            check_output(output, OptionError)
        if options.plot:
            plot.check()
        makers = choose_proposers(options.proposers)
        renderer = None
        if options.model:
            check_model(options.model)
            renderer = load_renderer(options.model)
        files = [
            load_traces(path, options.limit, no_loops=options.no_loops, renderer=renderer)
            for path in paths
        ]
    except (OptionError, TraceError) as error:
        arguments.error(str(error))
    results = run(options, makers, files)
    report(results, files)
    try:
        if options.json:
            content = {"meta": {"versions": versions(), "argv": list(argv)}, "results": results}
            text = json.dumps(content, indent=1, allow_nan=False) + "\n"
            options.json.write_text(text, encoding="utf-8")
        if options.plot:
            plot.draw(results, options.plot)
    except OSError as error:  # the disk is full, for example
        arguments.error(f"{error.filename or 'a result'} was not written: {error.strerror}")
    return 0
