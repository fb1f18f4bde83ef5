"""The steps under a changing load as a table and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

from benchmarks.engines.plot import colours
from benchmarks.load.steps import Step
from benchmarks.methods import BASELINE
from lookahead_vllm.simulation.markdown import markdown, number

Runs = Mapping[str, Sequence[Step]]
"""The steps of each method."""


@dataclass(frozen=True)
class Phase:
    """A time of constant load; if `busy`, another process computes on a core meanwhile."""

    batch_size: int
    seconds: float
    busy: bool = False

    def __str__(self) -> str:
        return f"batch {self.batch_size}, {self.seconds:g} s{', busy core' * self.busy}"


class PhaseFigures(TypedDict):
    """The figures of a method in a phase; None where a figure is not defined.

    tokens_per_s
        Emitted tokens over the phase's time.
    requests
        Requests that got tokens in a step; the median.
    step_ms
        A step's time, where it read no prompt; the median.
    nodes
        Draft tokens that a step verified; the mean.
    predicted_ms
        The cost model's prediction of the same steps; the median.
    error
        Of the prediction over the step's time, without its sign; the median.
    """

    tokens_per_s: float
    requests: float | None
    step_ms: float | None
    nodes: float | None
    predicted_ms: float | None
    error: float | None


def figures(steps: Sequence[Step], seconds: float) -> PhaseFigures:
    """The figures of the steps of a phase that lasted `seconds`."""
    predicted = [
        (step.predicted, step.seconds) for step in steps if step.predicted and step.seconds
    ]
    return {
        "tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "requests": _median(step.running for step in steps),
        "step_ms": _median(1e3 * step.seconds for step in steps if step.seconds),
        "nodes": _mean(step.nodes for step in steps if step.nodes is not None),
        "predicted_ms": _median(1e3 * prediction for prediction, _ in predicted),
        "error": _median(abs(prediction - time) / time for prediction, time in predicted),
    }


def by_phase(runs: Runs, phases: Sequence[Phase]) -> dict[str, list[PhaseFigures]]:
    """The figures of each method in each phase."""
    return {
        method: [
            figures([step for step in steps if step.phase == index], phase.seconds)
            for index, phase in enumerate(phases)
        ]
        for method, steps in runs.items()
    }


def table(runs: Runs, phases: Sequence[Phase]) -> str:
    """One line for each phase and method."""
    head = ["phase", "method", "requests", "tokens/s", "ratio", "step ms", "nodes/step"]
    head += ["predicted ms", "error"]
    by_method = by_phase(runs, phases)
    body = []
    for index, phase in enumerate(phases):
        for place, (method, rows) in enumerate(by_method.items()):
            row = rows[index]
            plain = by_method[BASELINE][index]["tokens_per_s"] if BASELINE in by_method else 0.0
            error = row["error"]
            body.append(
                [
                    f"{index + 1}: {phase}" if place == 0 else "",
                    method,
                    number(row["requests"], 0),
                    number(row["tokens_per_s"], 1),
                    number(row["tokens_per_s"] / plain if plain else None),
                    number(row["step_ms"], 1),
                    number(row["nodes"], 1),
                    number(row["predicted_ms"], 1),
                    number(None if error is None else 100 * error, 0) + " %" * (error is not None),
                ]
            )
    return markdown(head, body)


def plot(runs: Runs, phases: Sequence[Phase], path: Path, title: str) -> None:
    """Draw requests, nodes, tokens/s and step times over time, second by second.

    Lines separate the phases; a grey background marks those with a busy core.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: list[tuple[str, Callable[[Sequence[Step]], float | None]]] = [
        ("requests running", lambda steps: _mean(step.running for step in steps)),
        (
            "nodes a step",
            lambda steps: _mean(step.nodes for step in steps if step.nodes is not None),
        ),
        ("tokens/s", lambda steps: float(sum(step.tokens for step in steps))),
        ("ms a step", lambda steps: _median(1e3 * s.seconds for s in steps if s.seconds)),
    ]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(11, 9), sharex=True, layout="constrained"
    )
    for axis, (label, measure) in zip(axes, panels, strict=True):
        for method, colour in colours(runs).items():
            if method in runs:
                _line(axis, runs[method], measure, color=colour, label=method)
        ends = list(accumulate(phase.seconds for phase in phases))
        for phase, end in zip(phases, ends, strict=True):
            axis.axvline(end, color="lightgrey", linewidth=1, zorder=0)
            if phase.busy:
                axis.axvspan(end - phase.seconds, end, color="0.92", zorder=0)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, ends[-1])
        axis.spines[["top", "right"]].set_visible(False)
    for method, colour in colours(runs).items():
        if any(step.predicted for step in runs.get(method, [])):
            _line(
                axes[-1],
                runs[method],
                lambda steps: _median(1e3 * s.predicted for s in steps if s.predicted),
                color=colour,
                linestyle=":",
                label=f"{method}, predicted",
            )
    axes[-1].set_xlabel("seconds")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _line(
    axis: object, steps: Sequence[Step], measure: Callable[[Sequence[Step]], float | None],
    **style: object,
) -> None:  # fmt: skip
    seconds: dict[int, list[Step]] = {}
    for step in steps:
        seconds.setdefault(int(step.time), []).append(step)
    values = [measure(seconds.get(second, [])) for second in range(max(seconds, default=-1) + 1)]
    points = [(second + 0.5, value) for second, value in enumerate(values) if value is not None]
    if points:
        axis.plot(*zip(*points, strict=True), linewidth=1.5, **style)  # type: ignore[attr-defined]


def _mean(values: Iterable[float]) -> float | None:
    present = list(values)
    return statistics.fmean(present) if present else None


def _median(values: Iterable[float]) -> float | None:
    present = list(values)
    return statistics.median(present) if present else None
