"""Rows of a benchmark as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.engines.rows import Row
from benchmarks.methods import BASELINE

Panel = Literal["tokens_per_s", "ratio"]

MIN_RATIO = 0.97
"""Speculation should never be slower than this share of plain vLLM's speed."""


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw tokens/s and the ratio to plain vLLM, by method and batch size.

    Up to two batch sizes become grouped bars, more become lines. Whiskers span rounds and turns.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    sizes = sorted({row["batch_size"] for row in rows})
    panels: list[tuple[Panel, str]] = [("tokens_per_s", "tokens/s")]
    if any(row["ratio"] is not None for row in rows):
        panels.append(("ratio", "ratio to plain vLLM"))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        if len(sizes) > 2:
            _lines(axis, rows, sizes, key)
        else:
            _bars(axis, rows, sizes, key)
            axis.set_ylim(bottom=0)
        axis.set_xlabel("batch size")
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        if key == "ratio":
            for height, style in ((1.0, "-"), (MIN_RATIO, ":")):
                axis.axhline(height, color="grey", linewidth=1, linestyle=style, zorder=0)
                axis.annotate(
                    f"{height:.2f}", (1.01, height), xycoords=("axes fraction", "data"),
                    color="grey", fontsize=8, va="center",
                )  # fmt: skip
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def colours(methods: Iterable[str]) -> dict[str, str]:
    """A colour for each method; plain vLLM is grey."""
    others = [name for name in dict.fromkeys(methods) if name != BASELINE]
    return {BASELINE: "grey", **{name: f"C{number}" for number, name in enumerate(others)}}


def _series(rows: Sequence[Row], key: Panel) -> dict[str, dict[int, Row]]:
    series: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: row["batch_size"]):
        if row[key] is not None:
            series.setdefault(row["method"], {})[row["batch_size"]] = row
    return series


def _whiskers(row: Row, key: Panel) -> tuple[float, float]:
    runs = row["tokens_per_s_runs"] if key == "tokens_per_s" else row["ratio_runs"]
    middle = row[key] or 0.0
    return max(middle - min(runs), 0.0), max(max(runs) - middle, 0.0)


def _bars(axis: Any, rows: Sequence[Row], sizes: Sequence[int], key: Panel) -> None:
    series = _series(rows, key)
    colour = colours(row["method"] for row in rows)
    width = 0.8 / max(len(series), 1)
    for place, (method, by_size) in enumerate(series.items()):
        shift = (place - (len(series) - 1) / 2) * width
        heights = [row[key] or 0.0 for row in by_size.values()]
        low, high = zip(*(_whiskers(row, key) for row in by_size.values()), strict=True)
        repeated = any(low) or any(high)
        bars = axis.bar(
            [sizes.index(size) + shift for size in by_size],
            heights,
            width * 0.92,
            label=method,
            color=colour[method],
            yerr=(low, high) if repeated else None,
        )
        axis.bar_label(bars, fmt="%.2f" if key == "ratio" else "%.0f", padding=2, fontsize=8)
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])


def _lines(axis: Any, rows: Sequence[Row], sizes: Sequence[int], key: Panel) -> None:
    """A line for each method over the logarithm of the batch size; ratios leave out plain vLLM."""
    series = {
        method: by_size
        for method, by_size in _series(rows, key).items()
        if key == "tokens_per_s" or method != BASELINE
    }
    colour = colours(row["method"] for row in rows)
    for place, (method, by_size) in enumerate(series.items()):
        heights = [row[key] or 0.0 for row in by_size.values()]
        low, high = zip(*(_whiskers(row, key) for row in by_size.values()), strict=True)
        shift = 2 ** (0.08 * (place - (len(series) - 1) / 2))  # so that whiskers do not overlap
        axis.errorbar(
            [size * shift for size in by_size],
            heights,
            yerr=(low, high),
            marker="o",
            markersize=4,
            capsize=2,
            elinewidth=1,
            color=colour[method],
            label=method,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    if key == "tokens_per_s":
        axis.set_ylim(bottom=0)
