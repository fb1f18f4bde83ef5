"""Compute rows from runs: the figures of one method at one batch size."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from benchmarks.engines.generate import Generation, Turn


class Figures(TypedDict):
    """The figures of a set of answers; None where a figure is not defined."""

    tokens: int | None
    tokens_per_s: float | None
    """Emitted tokens over wall time, prefills included. For a category, only at batch size 1."""
    ratio: float | None
    """`tokens_per_s` over that of plain vLLM."""
    steps: int | None
    """Decode steps of a request, summed over the requests."""
    tokens_per_step: float | None
    """Tokens that decode steps emitted over `steps`, drafted or not: the papers' EDL and S. Plain
    vLLM has 1.00."""
    acceptance_length: float | None
    """vLLM's mean acceptance length: 1 + accepted draft tokens over the steps that had a draft."""
    draft_tokens_per_step: float | None
    """Draft tokens that were verified, over `steps`."""
    mismatches: int | None
    """Prompts whose token ids differ from plain vLLM's."""


class Row(Figures):
    """The figures of a method at a batch size; those of `_runs` by turn."""

    method: str
    batch_size: int
    prompts: int
    """Their number."""
    full: float | None
    """The share of the time in which the batch was full; at the end of a turn it empties."""
    by_category: dict[str, Figures]
    tokens_per_s_runs: list[float]
    ratio_runs: list[float]
    tokens_per_step_runs: list[float]
    error: str | None


@dataclass(frozen=True)
class Run:
    """A method's work at a batch size.

    Turn k of K answered every K-th prompt, from the k-th on.
    """

    turns: list[Turn]
    cores: Sequence[int] = ()
    """The cores that vLLM bound its worker's threads to."""

    @cached_property
    def generations(self) -> list[Generation]:
        """The answer to each prompt, in the order of the prompts."""
        turns = [iter(turn.generations) for turn in self.turns]
        count = sum(len(turn.generations) for turn in self.turns)
        return [next(turns[index % len(turns)]) for index in range(count)]

    @property
    def seconds(self) -> float:
        """The wall time of all turns."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def full(self) -> float:
        """The share of `seconds` in which the batch was full."""
        return sum(turn.full_seconds for turn in self.turns) / self.seconds


@dataclass(frozen=True)
class Outcome:
    """The result of one method: a run, or the reason of its failure."""

    run: Run | None = None
    error: str | None = None


NO_FIGURES: Figures = dict.fromkeys(Figures.__annotations__)  # type: ignore[assignment]
"""Of a run that failed, or of a category without prompts."""


def make_row(
    method: str,
    batch_size: int,
    outcome: Outcome,
    baseline: Run | None,
    categories: Sequence[str],
    check_exact: bool,
) -> Row:
    """Sum up the outcome of a method at a batch size; `categories` has that of each prompt.

    The baseline is plain vLLM's run; with `check_exact`, answers that differ from it are counted.
    """
    run = outcome.run
    turns = run.turns if run else []

    def of(chosen: Sequence[int]) -> Figures:
        return figures(run, baseline, chosen, batch_size, check_exact) if run else NO_FIGURES

    names = dict.fromkeys(categories)
    members = {name: [i for i, c in enumerate(categories) if c == name] for name in names}
    plain = [_speed(turn) for turn in baseline.turns] if baseline else []
    speeds = [_speed(turn) for turn in turns]
    lengths = [tokens_per_step(turn.generations) for turn in turns]
    return {
        "method": method,
        "batch_size": batch_size,
        "prompts": len(categories),
        "full": run.full if run else None,
        **of(range(len(categories))),
        "by_category": {name: of(chosen) for name, chosen in members.items()},
        "tokens_per_s_runs": speeds,
        "ratio_runs": [ours / theirs for ours, theirs in zip(speeds, plain, strict=False)],
        "tokens_per_step_runs": [length for length in lengths if length is not None],
        "error": outcome.error,
    }


def figures(
    run: Run, baseline: Run | None, chosen: Sequence[int], batch_size: int, check_exact: bool
) -> Figures:
    """The figures of the chosen prompts in one run."""
    picked = [run.generations[i] for i in chosen]
    steps = decode_steps(picked)
    drafts = sum(g.drafts for g in picked)
    speed = tokens_per_s(run, chosen, batch_size)
    plain = tokens_per_s(baseline, chosen, batch_size) if baseline else None
    return {
        "tokens": sum(len(g.token_ids) for g in picked),
        "tokens_per_s": speed,
        "ratio": speed / plain if speed and plain else None,
        "steps": steps,
        "tokens_per_step": tokens_per_step(picked),
        "acceptance_length": 1 + sum(g.accepted for g in picked) / drafts if drafts else None,
        "draft_tokens_per_step": sum(g.draft_tokens for g in picked) / steps if steps else None,
        "mismatches": (
            sum(run.generations[i].token_ids != baseline.generations[i].token_ids for i in chosen)
            if check_exact and baseline
            else None
        ),
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of two or more values, and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5


def decode_steps(generations: Sequence[Generation]) -> int:
    """Decode steps of a request, summed over the requests."""
    return sum(max(generation.steps, 0) for generation in generations)


def tokens_per_step(generations: Sequence[Generation]) -> float | None:
    """Tokens a decode step; the first token of an answer is the prefill's."""
    steps = decode_steps(generations)
    tokens = sum(max(len(generation.token_ids) - 1, 0) for generation in generations)
    return tokens / steps if steps else None


def tokens_per_s(run: Run, chosen: Sequence[int], batch_size: int) -> float | None:
    """Speed over the chosen prompts; None for a part of the prompts if requests share steps."""
    tokens = sum(len(run.generations[i].token_ids) for i in chosen)
    if len(chosen) == len(run.generations):
        return tokens / run.seconds
    if batch_size > 1:
        return None
    return tokens / sum(run.generations[i].seconds for i in chosen)


def _speed(turn: Turn) -> float:
    return sum(len(generation.token_ids) for generation in turn.generations) / turn.seconds
