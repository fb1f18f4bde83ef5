"""Drafting without a model: recorded generations replayed, step by step, as the engine would.

Source: LLMA (2023), Algorithm 2, widened to trees: what the model would say is known, so that the
longest path of each draft tree that agrees with it is accepted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Literal, TypedDict

import numpy as np

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest
from lookahead_vllm.simulation.drafters import Drafter
from lookahead_vllm.simulation.traces import Trace, TraceFile
from lookahead_vllm.verify.acceptance import accepted_paths

Mode = Literal["cold", "warm", "replay"]
MODES: tuple[Mode, ...] = ("cold", "warm", "replay")

WARM_UP = 3  # traces that a throw-away drafter plays first, so that no measured call compiles

Advance = Callable[[int], None]
"""Told how many output tokens were played."""


@dataclass
class Played:
    """What came of one trace: one entry a decode step in `nodes`, one a call in the times."""

    category: str
    tokens: int = 0
    """Emitted by decode steps: all but the prefill's."""
    nodes: list[int] = field(default_factory=list)
    propose_ns: list[int] = field(default_factory=list)
    update_ns: list[float] = field(default_factory=list)
    """Per token."""
    start_ns: int = 0


class Figures(TypedDict):
    """What is said of a set of traces; None where nothing was measured.

    edl
        Tokens a decode step, the bonus token included.
    nodes
        Draft tokens a decode step; plain steps count.
    propose_us_p50, propose_us_p99
        Microseconds of a call of `propose`.
    update_us_p50, update_us_p99
        Microseconds of a call of `extend` over the tokens of that call.
    start_us_p50
        Microseconds of a call of `start`: the prompt of a request.
    tokens, steps
        Emitted by decode steps, and how many steps there were.
    speedup
        With a cost curve t: `tokens * t(1)` over the sum of `t(1 + nodes)` of the steps.
    """

    edl: float
    nodes: float
    propose_us_p50: float | None
    propose_us_p99: float | None
    update_us_p50: float
    update_us_p99: float
    start_us_p50: float
    tokens: int
    steps: int
    speedup: float | None


class FileFigures(Figures):
    """And of a file; `bytes_per_cached_token` is that of the made-up answers alone."""

    bytes: int
    bytes_per_cached_token: float | None


class Entry(FileFigures):
    """The figures of one drafter with one budget in one mode, pooled over the files.

    `bytes` and `bytes_per_cached_token` are the largest of the files', which share no cache.
    """

    by_category: dict[str, Figures]
    by_file: dict[str, FileFigures]


def play(drafter: Drafter, trace: Trace, request_id: str, budget: int) -> Played:
    """Replay one generation, as the engine would with one request at a time.

    The first output token is the prefill's. Then each step proposes, accepts the longest path of
    the tree that agrees with the recorded output, and commits that path and the bonus token. No
    path may leave room for less than the bonus token, so nodes deeper than that are not sent; a
    step with a single token to go has no draft.
    """
    played = Played(trace.category)
    text = np.concatenate((trace.prompt, trace.output))
    answer = trace.output.tolist()
    expected = np.append(trace.output, -1)  # -1: beyond the end, where no token agrees
    before = perf_counter_ns()
    drafter.start(request_id, trace.prompt)
    played.start_ns = perf_counter_ns() - before
    done, new = 0, answer[:1]
    while True:
        before = perf_counter_ns()
        drafter.extend(request_id, new)
        played.update_ns.append((perf_counter_ns() - before) / len(new))
        done += len(new)
        if done == len(answer):
            break
        max_depth = min(budget, len(answer) - done - 1)
        tree = EMPTY_TREE
        if max_depth > 0:
            limit = DraftLimits(request_id, budget, max_depth)
            context = text[: len(trace.prompt) + done]
            before = perf_counter_ns()
            draft = drafter.propose(limit, context)
            played.propose_ns.append(perf_counter_ns() - before)
            tree = drafter.tree(draft)
            assert len(tree) <= budget
        choices = expected[np.minimum(done + np.append(0, tree.depths), len(answer))]
        accepted = accepted_paths(DraftForest.of([tree]), choices[:1], choices[1:]).shape[1]
        new = answer[done : done + accepted + 1]  # of a tree that is too deep, no more than is left
        played.tokens += len(new)
        played.nodes.append(int((tree.depths <= max_depth).sum()))
    drafter.finish(request_id)
    return played


def simulate(
    make: Callable[[], Drafter],
    budget: int,
    files: Sequence[TraceFile],
    modes: Sequence[Mode],
    *,
    curve: CostCurve | None = None,
    filling: Sequence[Trace] = (),
    advance: Advance = lambda tokens: None,
) -> dict[Mode, Entry]:
    """Replay every file with a drafter of its own, and say what came of it.

    Parameters
    ----------
    make : callable
        Makes a fresh drafter.
    budget : int
        The most nodes of a tree.
    files : Sequence[TraceFile]
        Each starts from an empty cache.
    modes : Sequence[Mode]
        "cold": all traces of a file, in order; "warm": those of its second half, after its first;
        "replay": all of them, after they were all played once.
    curve : CostCurve, optional
        What a step costs, for the simulated speed-up.
    filling : Sequence[Trace]
        Answers that every cache hears before the first trace.
    advance : callable
        Told how many output tokens were played, warm-up excluded.
    """
    throw_away = make()
    for i, trace in enumerate(files[0].traces[:WARM_UP]):
        play(throw_away, trace, f"warm-up-{i}", budget)
    del throw_away
    played: dict[Mode, list[list[Played]]] = {mode: [] for mode in modes}
    by_file: dict[Mode, dict[str, FileFigures]] = {mode: {} for mode in modes}
    for file in files:
        drafter = make()
        for i, trace in enumerate(filling):
            drafter.start(f"filling-{i}", trace.prompt)
            drafter.extend(f"filling-{i}", trace.output.tolist())
            drafter.finish(f"filling-{i}")
            advance(len(trace.output))
        filled = sum(len(trace.output) for trace in filling)
        per_token = drafter.num_bytes / filled if filled else None

        first = _play_all(drafter, file, budget, 1, advance)
        of_mode: dict[Mode, list[Played]] = {"cold": first, "warm": first[len(first) // 2 :]}
        held = dict.fromkeys(("cold", "warm"), drafter.num_bytes)
        if "replay" in modes:
            of_mode["replay"] = _play_all(drafter, file, budget, 2, advance)
            held["replay"] = drafter.num_bytes
        for mode in modes:
            played[mode].append(of_mode[mode])
            by_file[mode][str(file.path)] = {
                **figures(of_mode[mode], curve),
                "bytes": held[mode],
                "bytes_per_cached_token": per_token,
            }
    return {mode: _entry(played[mode], by_file[mode], curve) for mode in modes}


def _play_all(
    drafter: Drafter, file: TraceFile, budget: int, turn: int, advance: Advance
) -> list[Played]:
    result = []
    with _no_garbage_collection():
        for i, trace in enumerate(file.traces):
            result.append(play(drafter, trace, f"{turn}-{i}", budget))
            advance(len(trace.output))
    return result


def passes(modes: Sequence[Mode]) -> int:
    """How often `simulate` plays each file."""
    return 2 if "replay" in modes else 1


def figures(played: Sequence[Played], curve: CostCurve | None = None) -> Figures:
    """The figures of some traces, at least one."""
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
        "update_us_p99": _microseconds(update, 99),
        "start_us_p50": _microseconds([one.start_ns for one in played], 50),
        "tokens": tokens,
        "steps": len(nodes),
        "speedup": float(tokens * curve(1) / curve(1 + nodes).sum()) if curve else None,
    }


def _entry(
    files: Sequence[Sequence[Played]], by_file: dict[str, FileFigures], curve: CostCurve | None
) -> Entry:
    everything = [one for file in files for one in file]
    categories: dict[str, list[Played]] = {}
    for one in everything:
        categories.setdefault(one.category, []).append(one)
    per_token = [file["bytes_per_cached_token"] for file in by_file.values()]
    return {
        **figures(everything, curve),
        "bytes": max(file["bytes"] for file in by_file.values()),
        "bytes_per_cached_token": max((value for value in per_token if value), default=None),
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
