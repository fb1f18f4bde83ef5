"""Replay of recorded generations, step by step as in the engine, but without a model.

Source: LLMA (2023), Algorithm 2, extended to trees: the recorded output stands in for the model,
and the longest path of each draft tree that agrees with it is accepted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Literal, TypedDict

import numpy as np
from tqdm import tqdm

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.progress import NO_CHAINS
from lookahead_vllm.draft.proposer import Proposer
from lookahead_vllm.draft.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest
from lookahead_vllm.simulation.traces import Trace, TraceFile
from lookahead_vllm.verify.acceptance import accepted_paths

Mode = Literal["cold", "replay"]
MODES: tuple[Mode, ...] = ("cold", "replay")

WARM_UP_TRACES = 3
"""The number of traces replayed first with a separate proposer, so that no timed call compiles."""


@dataclass
class Played:
    """The measurements of one replayed trace."""

    category: str
    tokens: int = 0
    """Tokens emitted by decode steps: all but the prefill's."""
    nodes: list[int] = field(default_factory=list)
    """The draft tokens of each decode step."""
    propose_ns: list[int] = field(default_factory=list)
    """The time of each call of `draft_trees`."""
    update_ns: list[float] = field(default_factory=list)
    """The time of each call of `read`, divided by its number of tokens."""


class Figures(TypedDict):
    """The figures of a set of traces; None if nothing was measured.

    edl
        Tokens per decode step, the bonus token included.
    nodes
        Draft tokens per decode step; steps without a draft count.
    propose_us_p50, propose_us_p99
        Microseconds per call of `draft_trees`.
    update_us_p50
        Microseconds per token of a call of `read`.
    tokens, steps
        Tokens emitted by decode steps, and the number of these steps.
    speedup
        With a cost curve t: `tokens * t(1)` over the sum of `t(1 + nodes)` of all steps.
    """

    edl: float
    nodes: float
    propose_us_p50: float | None
    propose_us_p99: float | None
    update_us_p50: float
    tokens: int
    steps: int
    speedup: float | None


class Entry(Figures):
    """The figures of one proposer with one budget in one mode, pooled over the files."""

    by_category: dict[str, Figures]
    by_file: dict[str, Figures]


def play(proposer: Proposer, trace: Trace, request_id: str, budget: int) -> Played:
    """Replay one generation as the only request of an engine.

    The prefill emits the first output token. Then each step proposes a tree of at most `budget`
    nodes, accepts its longest path that agrees with the recorded output, and commits that path and
    the bonus token. A path ends at least one token before the output, which leaves the bonus
    token: deeper nodes are not sent, and the last token has no draft.
    """
    played = Played(trace.category)
    answer = trace.output.tolist()
    expected = np.append(trace.output, -1)  # -1 agrees with no token beyond the end
    proposer.start(request_id, trace.prompt)  # type: ignore[arg-type]
    chain_length = proposer.proposed_after(np.empty(0, np.int64)).shape[1]
    done, new_tokens = 0, answer[:1]
    while True:
        chains = NO_CHAINS
        if trace.chains is not None and chain_length:
            chains = trace.chains[None, done + len(new_tokens) - 1, :chain_length]
        before = perf_counter_ns()
        read(proposer, {request_id: new_tokens}, chains=chains)
        played.update_ns.append((perf_counter_ns() - before) / len(new_tokens))
        done += len(new_tokens)
        if done == len(answer):
            break
        max_depth = min(budget, len(answer) - done - 1)
        tree = EMPTY_TREE
        if max_depth > 0:
            limit = DraftLimits(request_id, budget, max_depth)
            before = perf_counter_ns()
            (tree,) = draft_trees(proposer, [limit])
            played.propose_ns.append(perf_counter_ns() - before)
            assert len(tree) <= budget
        choices = expected[np.minimum(done + np.append(0, tree.depths), len(answer))]
        path = accepted_paths(DraftForest.of([tree]), choices[:1], choices[1:])[0]
        new_tokens = answer[done : done + len(path) + 1]  # a slice, so never past the end
        played.tokens += len(new_tokens)
        played.nodes.append(int((tree.depths <= max_depth).sum()))
    proposer.finish(request_id)
    return played


def simulate(
    make: Callable[[], Proposer],
    budget: int,
    files: Sequence[TraceFile],
    modes: Sequence[Mode],
    curve: CostCurve | None = None,
) -> dict[Mode, Entry]:
    """Replay every file, each with a new proposer, and return the figures by mode.

    Parameters
    ----------
    make : callable
        Makes a new proposer.
    budget : int
        The maximum number of nodes of a tree.
    files : Sequence[TraceFile]
        The traces; each file starts from an empty cache.
    modes : Sequence[Mode]
        "cold": all traces of a file, in order. "replay": after all were replayed once.
    curve : CostCurve, optional
        The cost of a step, for the simulated speed-up.
    """
    warm_up = make()
    for i, trace in enumerate(files[0].traces[:WARM_UP_TRACES]):
        play(warm_up, trace, f"warm-up-{i}", budget)
    del warm_up
    played: dict[Mode, list[list[Played]]] = {mode: [] for mode in modes}
    by_file: dict[Mode, dict[str, Figures]] = {mode: {} for mode in modes}
    for file in files:
        proposer = make()
        by_mode: dict[Mode, list[Played]] = {"cold": _play_all(proposer, file, budget, 1)}
        if "replay" in modes:
            by_mode["replay"] = _play_all(proposer, file, budget, 2)
        for mode in modes:
            played[mode].append(by_mode[mode])
            by_file[mode][str(file.path)] = figures(by_mode[mode], curve)
    return {mode: _entry(played[mode], by_file[mode], curve) for mode in modes}


def _play_all(proposer: Proposer, file: TraceFile, budget: int, replay_number: int) -> list[Played]:
    traces = tqdm(file.traces, file.path.name, unit=" texts", leave=False, disable=None)
    with _no_garbage_collection():
        return [
            play(proposer, trace, f"{replay_number}-{i}", budget) for i, trace in enumerate(traces)
        ]


def figures(played: Sequence[Played], curve: CostCurve | None = None) -> Figures:
    """The pooled figures of at least one replayed trace."""
    tokens = sum(one.tokens for one in played)
    nodes = np.array([n for one in played for n in one.nodes], dtype=np.int64)
    propose = [ns for one in played for ns in one.propose_ns]
    update = [ns for one in played for ns in one.update_ns]
    return {
        "edl": tokens / len(nodes),
        "nodes": float(nodes.mean()),
        "propose_us_p50": _microseconds(propose, 50) if propose else None,
        "propose_us_p99": _microseconds(propose, 99) if propose else None,
        "update_us_p50": _microseconds(update, 50),
        "tokens": tokens,
        "steps": len(nodes),
        "speedup": float(tokens * curve(1) / curve(1 + nodes).sum()) if curve else None,
    }


def _entry(
    files: Sequence[Sequence[Played]], by_file: dict[str, Figures], curve: CostCurve | None
) -> Entry:
    everything = [one for file in files for one in file]
    categories: dict[str, list[Played]] = {}
    for one in everything:
        categories.setdefault(one.category, []).append(one)
    return {
        **figures(everything, curve),
        "by_category": {name: figures(some, curve) for name, some in categories.items()},
        "by_file": by_file,
    }


def _microseconds(ns: Sequence[float], percentile: int) -> float:
    return float(np.percentile(ns, percentile)) / 1000


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
