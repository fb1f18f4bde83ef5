"""Replay of recorded generations, step by step as in the engine, but without a model.

Source: LLMA (2023), Algorithm 2, extended to trees: the recorded output stands in for the model,
and the longest path of each draft tree that agrees with it is accepted.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter_ns
from typing import Literal, TypedDict

import numpy as np
from tqdm import tqdm

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.insertion import CHUNK_TOKENS, MAX_SECONDS
from lookahead_vllm.draft.progress import NO_CHAINS
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.proposer import Proposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree
from lookahead_vllm.simulation.traces import Trace, TraceFile
from lookahead_vllm.verify.acceptance import accepted_paths

Mode = Literal["cold", "replay"]
MODES: tuple[Mode, ...] = ("cold", "replay")

INSERT_SECONDS = 0.7e-6
"""The time in which an engine inserts a token of a prompt."""
WAIT_SHARE = 0.4
"""The part of a step in which an engine waits for the device, and inserts."""

PROMPT_TOKENS = 8192
"""The tokens of prompts that an engine reads in a step, those of its prefix cache left out."""

WARM_UP_TRACES = 3
"""The number of traces replayed first with a separate proposer, so that no timed call compiles."""


@dataclass(frozen=True)
class Pace:
    """How requests come, and how texts are inserted."""

    concurrent: int = 1
    """So many sessions run at a time; a new one begins when one ends."""
    step_seconds: float | None = None
    """The length of a step, which limits what is inserted in it; None: all is inserted at once."""


class _Clock:
    """A clock for the insertion of texts: each look at it takes as long as a turn of insertion."""

    now = 0.0

    def __call__(self) -> float:
        self.now += CHUNK_TOKENS * INSERT_SECONDS
        return self.now


@dataclass
class Played:
    """The measurements of one replayed trace."""

    category: str
    turn: int = 0
    tokens: int = 0
    """Tokens emitted by decode steps: all but the prefill's."""
    nodes: list[int] = field(default_factory=list)
    """The draft tokens of each decode step."""
    propose_ns: list[float] = field(default_factory=list)
    """The time of each call of `draft_trees`, divided by its number of requests."""
    update_ns: list[float] = field(default_factory=list)
    """The time of each call of `read`, divided by its number of tokens."""


class Figures(TypedDict):
    """The figures of a set of traces; None if nothing was measured.

    edl
        Tokens per decode step, the bonus token included.
    nodes
        Draft tokens per decode step; steps without a draft count.
    propose_us_p50, propose_us_p99
        Microseconds per call of `draft_trees`, divided by its number of requests.
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
    by_turn: dict[str, Figures]


class _Live:
    """A trace that is replayed."""

    def __init__(self, trace: Trace, request_id: str, unread: int) -> None:
        self.trace, self.request_id = trace, request_id
        self.unread = unread
        """Tokens of the prompt that are to be read."""
        self.is_started = False
        self.played = Played(trace.category, trace.turn)
        self.answer = trace.output.tolist()
        self.expected = np.append(trace.output, -1)  # -1 agrees with no token beyond the end
        self.done = 0
        self.new = self.answer[:1]
        """The tokens of the last step: at first, that of the prefill."""

    def max_depth(self, budget: int) -> int:
        """Of the next tree, which ends at least one token before the answer."""
        return min(budget, len(self.answer) - self.done - 1)

    def step(self, tree: DraftTree, budget: int) -> None:
        """Accept the tree's longest path that agrees with the answer, and the next token."""
        choices = self.expected[np.minimum(self.done + np.append(0, tree.depths), len(self.answer))]
        path = accepted_paths(DraftForest.of([tree]), choices[:1], choices[1:])[0]
        # A slice, so never past the end.
        self.new = self.answer[self.done : self.done + len(path) + 1]
        self.played.tokens += len(self.new)
        self.played.nodes.append(int((tree.depths <= self.max_depth(budget)).sum()))


class Replay:
    """Replays generations as the requests of an engine."""

    def __init__(self, proposer: Proposer, budget: int, pace: Pace = Pace()) -> None:
        self._proposer, self._budget, self._pace = proposer, budget, pace
        self._clock = _Clock()
        if pace.step_seconds is not None and isinstance(proposer, NGramTrieProposer):
            queue = proposer.insertion
            queue.clock, queue.seconds = self._clock, MAX_SECONDS

    def play(self, sessions: Iterable[tuple[str, Sequence[Trace]]]) -> Iterator[Played]:
        """Replay the turns of each session, each after the one before; yields them as they end.
        A session has the id of its first request.

        The prefill emits the first output token. Then each step proposes a tree of at most `budget`
        nodes for each request, accepts its longest path that agrees with the recorded output, and
        commits that path and the bonus token. A path ends at least one token before the output,
        which leaves the bonus token: deeper nodes are not sent, and the last token has no draft.
        """
        left = iter(sessions)
        running = [self._turns(*session) for session in islice(left, self._pace.concurrent)]
        live = [next(turns) for turns in running]
        while live:
            begin = self._clock.now
            self._read_prompts(live)
            self._step([one for one in live if one.done])
            if self._pace.step_seconds is not None:
                self._proposer.work_for(WAIT_SHARE * self._pace.step_seconds)
                self._clock.now = begin + self._pace.step_seconds
            self._read([one for one in live if not one.unread])
            for at, one in reversed([*enumerate(live)]):
                if one.done < len(one.answer):
                    continue
                self._proposer.finish(one.request_id)
                yield one.played
                following = next(running[at], None)
                if following is None and (session := next(left, None)) is not None:
                    running[at] = self._turns(*session)
                    following = next(running[at])
                if following is None:
                    del live[at], running[at]
                else:
                    live[at] = following

    def _turns(self, session: str, turns: Sequence[Trace]) -> Iterator[_Live]:
        """The turns of a session, one after another."""
        cached = 0
        for i, trace in enumerate(turns):
            unread = max(len(trace.prompt) - cached, 1)
            one = _Live(trace, f"{session}-{i}" if i else session, unread)
            cached = len(trace.prompt) + len(trace.output)
            yield one

    def _read_prompts(self, live: Sequence[_Live]) -> None:
        """Read PROMPT_TOKENS of the prompts, and start the requests that this begins with."""
        room = PROMPT_TOKENS
        for one in live:
            read = min(one.unread, room)
            if read and not one.is_started:
                self._proposer.start(one.request_id, one.trace.prompt)  # type: ignore[arg-type]
                one.is_started = True
            one.unread, room = one.unread - read, room - read

    def _read(self, live: Sequence[_Live]) -> None:
        if not live:
            return
        length = self._proposer.proposed_after(np.empty(0, np.int64)).shape[1]
        chains = NO_CHAINS
        known = [one.trace.chains for one in live if one.trace.chains is not None]
        if length and len(known) == len(live):
            ends = [one.done + len(one.new) - 1 for one in live]
            chains = np.stack([own[end, :length] for own, end in zip(known, ends, strict=True)])
        before = perf_counter_ns()
        read(self._proposer, {one.request_id: one.new for one in live}, chains=chains)
        elapsed = (perf_counter_ns() - before) / sum(len(one.new) for one in live)
        for one in live:
            one.played.update_ns.append(elapsed)
            one.done += len(one.new)

    def _step(self, live: Sequence[_Live]) -> None:
        limits = [
            DraftLimits(one.request_id, self._budget, depth)
            for one in live
            if (depth := one.max_depth(self._budget)) > 0
        ]
        trees: Iterable[DraftTree] = ()
        if limits:
            before = perf_counter_ns()
            trees = draft_trees(self._proposer, limits)
            elapsed = (perf_counter_ns() - before) / len(limits)
        of_request = dict(zip((limit.request_id for limit in limits), trees, strict=True))
        for one in live:
            tree = of_request.get(one.request_id, EMPTY_TREE)
            assert len(tree) <= self._budget
            if one.request_id in of_request:
                one.played.propose_ns.append(elapsed)
            one.step(tree, self._budget)


def play(proposer: Proposer, trace: Trace, request_id: str, budget: int) -> Played:
    """Replay one generation as the only request of an engine."""
    [played] = Replay(proposer, budget).play([(request_id, [trace])])
    return played


def simulate(
    make: Callable[[], Proposer],
    budget: int,
    files: Sequence[TraceFile],
    modes: Sequence[Mode],
    curve: CostCurve | None = None,
    pace: Pace = Pace(),
) -> dict[Mode, Entry]:
    """Replay every file, each with a new proposer, and return the figures by mode.

    Parameters
    ----------
    budget : int
        The maximum number of nodes of a tree.
    modes : Sequence[Mode]
        "cold": all traces of a file, in order. "replay": after all were replayed once.
    curve : CostCurve, optional
        The cost of a step, for the simulated speed-up.
    """
    warm_up = make()
    for i, trace in enumerate(files[0].traces[:WARM_UP_TRACES]):
        play(warm_up, trace, f"warm-up-{i}", budget)
    del warm_up
    played: dict[Mode, dict[str, list[Played]]] = {mode: {} for mode in MODES}
    for file in files:
        replay = Replay(make(), budget, pace)
        for mode in MODES if "replay" in modes else MODES[:1]:
            played[mode][str(file.path)] = _play_all(replay, file, f"{mode}-")
    return {mode: _entry(played[mode], curve) for mode in modes}


def _play_all(replay: Replay, file: TraceFile, prefix: str) -> list[Played]:
    size = {"total": len(file.traces), "unit": " texts", "leave": False, "disable": None}
    with _no_garbage_collection():
        sessions = ((f"{prefix}{i}", turns) for i, turns in enumerate(file.sessions))
        return list(tqdm(replay.play(sessions), file.path.name, **size))


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


def _entry(files: dict[str, list[Played]], curve: CostCurve | None) -> Entry:
    everything = [one for file in files.values() for one in file]
    categories: dict[str, list[Played]] = {}
    turns: dict[str, list[Played]] = {}
    for one in everything:
        categories.setdefault(one.category, []).append(one)
        turns.setdefault("later turns" if one.turn else "first turns", []).append(one)

    def of_each(parts: dict[str, list[Played]]) -> dict[str, Figures]:
        return {name: figures(some, curve) for name, some in parts.items()}

    return {
        **figures(everything, curve),
        "by_category": of_each(categories),
        "by_file": of_each(files),
        "by_turn": of_each(turns),
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
