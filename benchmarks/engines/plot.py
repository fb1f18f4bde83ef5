"""Rows of a benchmark as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.engines.rows import Row, mean_and_error
from benchmarks.methods import BASELINE

Panel = Literal["tokens_per_s_runs", "ratio_runs"]

MOST_BARS = 4
"""With more batch sizes, lines are drawn."""


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw tokens/s and the ratio to plain vLLM, by method and batch size.

    Heights are means over rounds and turns, whiskers their standard errors.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    sizes = sorted({row["batch_size"] for row in rows})
    panels: list[tuple[Panel, str]] = [("tokens_per_s_runs", "tokens/s")]
    if _series(rows, "ratio_runs"):
        panels.append(("ratio_runs", "tokens/s, ratio to plain vLLM"))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        (_bars if len(sizes) <= MOST_BARS else _lines)(axis, rows, sizes, key)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("batch size")
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        if key == "ratio_runs":
            axis.axhline(1, color="grey", linewidth=1)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def colours(methods: Iterable[str]) -> dict[str, str]:
    """A colour for each method; plain vLLM is grey."""
    others = [name for name in dict.fromkeys(methods) if name != BASELINE]
    return {BASELINE: "grey", **{name: f"C{number}" for number, name in enumerate(others)}}


def _series(rows: Sequence[Row], key: Panel) -> dict[str, dict[int, tuple[float, float]]]:
    """Mean and standard error by method and batch size; ratios leave out plain vLLM."""
    series: dict[str, dict[int, tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["batch_size"]):
        if row[key] and (key == "tokens_per_s_runs" or row["method"] != BASELINE):
            series.setdefault(row["method"], {})[row["batch_size"]] = mean_and_error(row[key])
    return series


def _label(method: str) -> str:
    return "plain vLLM" if method == BASELINE else method


def _bars(axis: Any, rows: Sequence[Row], sizes: Sequence[int], key: Panel) -> None:
    series = _series(rows, key)
    colour = colours(row["method"] for row in rows)
    width = 0.8 / max(len(series), 1)
    for place, (method, by_size) in enumerate(series.items()):
        shift = (place - (len(series) - 1) / 2) * width
        heights, errors = zip(*by_size.values(), strict=True)
        bars = axis.bar(
            [sizes.index(size) + shift for size in by_size],
            heights,
            width * 0.92,
            label=_label(method),
            color=colour[method],
            yerr=errors if any(errors) else None,
        )
        axis.bar_label(bars, fmt="%.2f" if key == "ratio_runs" else "%.0f", padding=2, fontsize=8)
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])


def _lines(axis: Any, rows: Sequence[Row], sizes: Sequence[int], key: Panel) -> None:
    """A line for each method over the logarithm of the batch size."""
    series = _series(rows, key)
    colour = colours(row["method"] for row in rows)
    for place, (method, by_size) in enumerate(series.items()):
        heights, errors = zip(*by_size.values(), strict=True)
        shift = 2 ** (0.08 * (place - (len(series) - 1) / 2))  # so that whiskers do not overlap
        axis.errorbar(
            [size * shift for size in by_size],
            heights,
            yerr=errors,
            marker="o",
            markersize=4,
            capsize=2,
            elinewidth=1,
            color=colour[method],
            label=_label(method),
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
