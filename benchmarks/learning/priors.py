"""Learn the acceptance rates that a new trie starts from, and measure what they bring."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lookahead_vllm.cli.arguments import check_output, escape_unprintable
from lookahead_vllm.draft.trie import priors
from lookahead_vllm.draft.trie.acceptance_rate import HITS, TRIALS, AcceptanceRate
from lookahead_vllm.simulation.drafters import Lookahead
from lookahead_vllm.simulation.replay import Played, figures, play
from lookahead_vllm.simulation.traces import Trace, TraceError, TraceFile, load_traces

PART_TOKENS = 8000
"""Output tokens that are replayed before the trie is emptied, as if the engine started anew."""

EARLY_TOKENS = 1000
"""Output tokens after a start for which the gain is measured."""

EARLY_STARTS = 12
"""Starts over which it is averaged, with other texts each."""

LONG_TRACES = 100

TRAINING_NODES = 16

DESCRIPTION = """\
Learn priors.npz from recorded generations.

The traces are replayed through the trie, in parts that begin with an empty trie, and the rates of
all kinds of evidence are counted. No token and no text is kept.

With --evaluate, nothing is written: for each file, priors are learned from the files of the other
groups, and the tokens a step (EDL) are measured without and with them, in the first 1000 tokens
after a start and in a long run.
"""
EPILOG = """\
examples:
  python scripts/learn_priors.py --traces spec.jsonl humaneval.jsonl rag.jsonl
  python scripts/learn_priors.py --traces spec.jsonl humaneval_a.jsonl humaneval_b.jsonl \\
      --groups 0,1,1 --evaluate --budget 2,8,32
"""


class Edl(NamedTuple):
    """Tokens a step."""

    early: float
    long: float


def main(arguments: Sequence[str]) -> int:
    """The command."""
    escape_unprintable()
    options = _parser().parse_args(arguments)
    try:
        if not options.evaluate:
            check_output(options.out, TraceError)
            if options.out.suffix != ".npz":
                raise TraceError(f"--out {options.out}: the name must end in .npz")
        files = [load_traces(path, shuffle=options.seed, no_loops=True) for path in options.traces]
    except TraceError as error:
        print(f"learn_priors: {error}", file=sys.stderr)
        return 2
    groups = options.groups or list(range(len(files)))
    if len(groups) != len(files):
        print(
            f"learn_priors: --groups has {len(groups)} numbers for {len(files)} files",
            file=sys.stderr,
        )
        return 2
    if not options.evaluate:
        trials = learn(files, options.seed).trials
        learned = save(trials, options.out)
        size = options.out.stat().st_size
        print(f"{options.out}: {len(learned.indices)} of {len(trials)} rates, {size} bytes")
        return 0
    if len(set(groups)) < 2:
        print("learn_priors: --evaluate needs files of at least two groups", file=sys.stderr)
        return 2
    learned_without: dict[int, priors.Priors] = {}
    for group in sorted(set(groups)):
        others = [f for f, g in zip(files, groups, strict=True) if g != group]
        trials = learn(others, options.seed).trials
        learned_without[group] = priors_of(trials)
    print("| nodes | file | first 1000 tokens | with priors | long run | with priors |")
    print("| --: | :-- | --: | --: | --: | --: |")
    for budget in options.budget:
        rows: list[tuple[Edl, Edl]] = []
        for file, group in zip(files, groups, strict=True):
            before = measure(file, budget, None)
            after = measure(file, budget, learned_without[group])
            rows.append((before, after))
            _print_row(budget, file.path.stem, before, after)
        means = np.mean(rows, axis=0)
        _print_row(budget, "mean", Edl(*means[0]), Edl(*means[1]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--traces",
        nargs="+",
        type=Path,
        required=True,
        help="files for `lookahead-vllm simulate`",
    )
    parser.add_argument("--out", type=Path, default=priors.PATH, help="default: the package's file")
    parser.add_argument("--evaluate", action="store_true", help="measure, and write nothing")
    parser.add_argument(
        "--groups",
        type=_numbers,
        metavar="N,M",
        help="a number for each file: files of one group are never learned from and measured in "
        "one go (default: each file is a group)",
    )
    parser.add_argument(
        "--budget", type=_numbers, default=[2, 4, 8, 32, 64], metavar="N,M", help="nodes to measure"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order of the traces")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _print_row(budget: int, name: str, before: Edl, after: Edl) -> None:
    early, late = after.early / before.early - 1, after.long / before.long - 1
    print(
        f"| {budget} | {name} | {before.early:.2f} | {after.early:.2f} ({early:+.1%}) "
        f"| {before.long:.2f} | {after.long:.2f} ({late:+.1%}) |",
        flush=True,
    )


def learn(files: Sequence[TraceFile], seed: int) -> AcceptanceRate:
    """The rates after all parts of the files, in random order."""
    parts = [part for file in files for part in _parts(file.traces, PART_TOKENS)]
    random.Random(seed).shuffle(parts)
    rate = AcceptanceRate()
    for part in tqdm(parts, "Learning", unit="part", leave=False):
        _play_all(_drafter(TRAINING_NODES, rate), part, TRAINING_NODES)
    return rate


def priors_of(trials: NDArray[np.float32]) -> priors.Priors:
    """The shares of rates with enough `trials`, float32 [num_rates, 2], rounded as in a file."""
    indices = np.flatnonzero(trials[:, TRIALS] >= priors.TRIALS)
    shares = (trials[indices, HITS] / trials[indices, TRIALS]).astype(np.float16)
    return priors.Priors(indices.astype(np.uint16), shares.astype(np.float32))


def save(trials: NDArray[np.float32], path: Path) -> priors.Priors:
    """Write the priors, and return what `priors.load` will return."""
    learned = priors_of(trials)
    shares = learned.shares.astype(np.float16)
    np.savez_compressed(path, num_rates=len(trials), indices=learned.indices, shares=shares)
    return learned


def measure(file: TraceFile, budget: int, learned: priors.Priors | None) -> Edl:
    """Tokens a step of at most `budget` nodes, each start with these priors."""
    early = [
        played
        for part in list(_parts(file.traces, EARLY_TOKENS))[:EARLY_STARTS]
        for played in _play_all(_drafter(budget, AcceptanceRate(learned)), part, budget)
    ]
    long = _play_all(_drafter(budget, AcceptanceRate(learned)), file.traces[:LONG_TRACES], budget)
    return Edl(figures(early)["edl"], figures(long)["edl"])


def _parts(traces: Sequence[Trace], num_tokens: int) -> Iterator[list[Trace]]:
    """Consecutive traces with at least `num_tokens` output tokens; the rest is left out."""
    part: list[Trace] = []
    for trace in traces:
        part.append(trace)
        if sum(len(one.output) for one in part) >= num_tokens:
            yield part
            part = []


def _drafter(budget: int, rate: AcceptanceRate) -> Lookahead:
    """A drafter with an empty trie and these rates, which it goes on to learn."""
    drafter = Lookahead({"proposer": "ngram_trie", "max_nodes": 400_000}, budget, None)
    drafter.proposer.rate = rate  # type: ignore[attr-defined]
    return drafter


def _play_all(drafter: Lookahead, traces: Sequence[Trace], budget: int) -> list[Played]:
    return [play(drafter, trace, str(i), budget) for i, trace in enumerate(traces)]
