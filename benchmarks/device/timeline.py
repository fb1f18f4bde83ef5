"""A picture of some steps: what the host does, and when the device is busy."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.device.engine import Measurement
from benchmarks.device.pieces import OTHER, PIECES, WAIT

COLOURS = {
    "schedule": "#4c78a8",
    "prepare": "#72b7b2",
    "inputs": "#2f8f89",
    "attention": "#88d27a",
    "forward": "#9ecae9",
    "sample": "#b279a2",
    "draft": "#f58518",
    WAIT: "#eeeeee",
    "update": "#54a24b",
    OTHER: "#bab0ac",
}
BUSY, IDLE = "#555555", "#e45756"

FILE_TYPES = (".png", ".svg")
LANE = 0.8


def draw(measured: Mapping[str, Measurement], path: Path, title: str) -> None:
    """Draw the timelines, one below the other, on a common axis in milliseconds.

    Parameters
    ----------
    measured
        Measurements by the name that is written beside them.
    path
        A file of one of FILE_TYPES.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(
        len(measured),
        1,
        figsize=(11, 0.9 * len(measured) + 1.2),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, measurement) in zip(axes[:, 0], measured.items(), strict=True):
        _draw_lanes(axis, measurement)
        axis.set_yticks([0, 1], ["device", "host"], fontsize=8)
        axis.set_title(name, fontsize=9, loc="left", pad=2)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    axes[-1, 0].set_xlabel("ms")
    colours = {piece: COLOURS[piece] for piece in PIECES}
    colours |= {"device busy": BUSY, "device waits": IDLE}
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_lanes(axis: Any, measurement: Measurement) -> None:
    """The host's lane above the device's."""
    changes, launches = measurement.changes, measurement.launches
    end = launches[-1][1]
    ends = [*(instant for instant, _ in changes[1:]), end]
    for (instant, piece), until in zip(changes, ends, strict=True):
        _bar(axis, 1, instant, until, COLOURS[piece])
    for start, until in launches:
        _bar(axis, 0, start, until, BUSY)
    for (_, until), (start, _) in pairwise(launches):
        if start > until:
            _bar(axis, 0, until, start, IDLE)


def _bar(axis: Any, lane: int, start: float, end: float, colour: str) -> None:
    bottom, edge = lane - LANE / 2, "white" if colour == BUSY else None
    axis.broken_barh([(start, end - start)], (bottom, LANE), facecolor=colour, edgecolor=edge)
