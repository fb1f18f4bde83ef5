"""Rows as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lookahead_vllm.bench.rows import Row

Panel = Literal["tokens_per_s", "ratio"]


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw tokens/s, and the ratio to plain vLLM, by method and batch size.

    Up to two batch sizes are grouped bars, more are lines. Whiskers span the rounds.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
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
        axis.set_xlabel("batch size")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        if key == "ratio":
            axis.axhline(1, color="grey", linewidth=1, linestyle="--", zorder=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _series(rows: Sequence[Row], key: Panel) -> dict[str, dict[int, Row]]:
    series: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row[key] is not None:
            series.setdefault(row["method"], {})[row["batch_size"]] = row
    return series


def _whiskers(row: Row, key: Panel) -> tuple[float, float]:
    runs = row["tokens_per_s_runs"] if key == "tokens_per_s" else row["ratio_runs"]
    middle = row[key] or 0.0
    return middle - min(runs), max(runs) - middle


def _bars(axis: Any, rows: Sequence[Row], sizes: Sequence[int], key: Panel) -> None:
    series = _series(rows, key)
    width = 0.8 / max(len(series), 1)
    for place, (method, of_size) in enumerate(series.items()):
        where = [sizes.index(size) + (place - (len(series) - 1) / 2) * width for size in of_size]
        heights = [row[key] or 0.0 for row in of_size.values()]
        low, high = zip(*(_whiskers(row, key) for row in of_size.values()), strict=True)
        repeated = any(low) or any(high)
        bars = axis.bar(
            where, heights, width * 0.92, label=method, yerr=(low, high) if repeated else None
        )
        axis.bar_label(bars, fmt="%.2f" if key == "ratio" else "%.0f", padding=2, fontsize=8)
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])


def _lines(axis: Any, rows: Sequence[Row], sizes: Sequence[int], key: Panel) -> None:
    for method, of_size in _series(rows, key).items():
        heights = [row[key] or 0.0 for row in of_size.values()]
        low, high = zip(*(_whiskers(row, key) for row in of_size.values()), strict=True)
        axis.errorbar(list(of_size), heights, yerr=(low, high), marker="o", capsize=2, label=method)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
