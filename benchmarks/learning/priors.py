"""Learn the acceptance rates that a new trie starts from."""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lookahead_vllm.cli.arguments import check_output, escape_unprintable
from lookahead_vllm.draft.growth import priors
from lookahead_vllm.draft.growth.acceptance_rate import HITS, TRIALS, AcceptanceRate
from lookahead_vllm.options.server import LookaheadOptions
from lookahead_vllm.simulation.proposers import proposer_of
from lookahead_vllm.simulation.replay import play
from lookahead_vllm.simulation.traces import Trace, TraceError, TraceFile, load_traces

PART_TOKENS = 8000
"""Output tokens that are replayed before the trie is emptied, as if the engine started anew."""

TRAINING_NODES = 16

DESCRIPTION = """\
Learn priors.npz from recorded generations.

The traces are replayed through the trie, in parts that begin with an empty trie, and the rates of
all kinds of evidence are counted. No token and no text is kept.
"""
EPILOG = """\
example:
  python scripts/learn_priors.py --traces spec.jsonl humaneval.jsonl rag.jsonl
"""


def main(arguments: Sequence[str]) -> int:
    """The command."""
    escape_unprintable()
    options = _parser().parse_args(arguments)
    try:
        check_output(options.out, TraceError)
        if options.out.suffix != ".npz":
            raise TraceError(f"--out {options.out}: the name must end in .npz")
        files = [load_traces(path, shuffle=options.seed, no_loops=True) for path in options.traces]
        trials = learn(files, options.seed).trials
    except TraceError as error:
        print(f"learn_priors: {error}", file=sys.stderr)
        return 2
    learned = save(trials, options.out)
    size = options.out.stat().st_size
    print(f"{options.out}: {len(learned.indices)} of {len(trials)} rates, {size} bytes")
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
    parser.add_argument("--seed", type=int, default=1, help="of the order of the traces")
    return parser


def learn(files: Sequence[TraceFile], seed: int) -> AcceptanceRate:
    """The rates after all parts of the files, in random order; TraceError if there are none."""
    parts = [part for file in files for part in _parts(file.traces)]
    if not parts:
        raise TraceError(f"no file has {PART_TOKENS} output tokens: too few to learn rates from")
    random.Random(seed).shuffle(parts)
    rate = AcceptanceRate()
    for part in tqdm(parts, "Learning", unit="part", leave=False):
        options = LookaheadOptions(proposer="ngram_trie", max_nodes=400_000)
        proposer = proposer_of(options, TRAINING_NODES, None)
        proposer.rate = rate  # type: ignore[attr-defined]
        for i, trace in enumerate(part):
            play(proposer, trace, str(i), TRAINING_NODES)
    return rate


def save(trials: NDArray[np.float32], path: Path) -> priors.Priors:
    """Write the shares of rates with enough `trials`, float32 [num_rates, 2], rounded to halves.

    Returns what `priors.load` will return.
    """
    indices = np.flatnonzero(trials[:, TRIALS] >= priors.TRIALS).astype(np.uint16)
    shares = (trials[indices, HITS] / trials[indices, TRIALS]).astype(np.float16)
    np.savez_compressed(path, num_rates=len(trials), indices=indices, shares=shares)
    return priors.Priors(indices, shares.astype(np.float32))


def _parts(traces: Sequence[Trace]) -> Iterator[list[Trace]]:
    """Consecutive traces with at least PART_TOKENS output tokens; the rest is left out."""
    part: list[Trace] = []
    for trace in traces:
        part.append(trace)
        if sum(len(one.output) for one in part) >= PART_TOKENS:
            yield part
            part = []
