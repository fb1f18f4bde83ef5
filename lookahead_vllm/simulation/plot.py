"""Plots of simulation results."""

from __future__ import annotations

from pathlib import Path

from lookahead_vllm.simulation.tables import Results, lines


def plot(results: Results, path: Path) -> None:
    """Plot EDL over nodes a step: a panel for each file and mode, a line for each proposer."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    entries = lines(results)
    modes = list(dict.fromkeys(mode for _, _, mode, _ in entries))
    files = list(dict.fromkeys(file for *_, entry in entries for file in entry["by_file"]))
    figure, axes = pyplot.subplots(
        len(modes),
        len(files),
        figsize=(4.2 * len(files) + 1, 3.6 * len(modes) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for row, mode in zip(axes, modes, strict=True):
        for axis, file in zip(row, files, strict=True):
            for proposer, budgets in results.items():
                points = [
                    by_mode[mode]["by_file"][file]
                    for by_mode in budgets.values()
                    if mode in by_mode
                ]
                axis.plot(
                    [point["nodes"] for point in points],
                    [point["edl"] for point in points],
                    marker="o",
                    markersize=4,
                    label=proposer,
                )
            title = f"{Path(file).stem}, {mode}".encode(errors="backslashreplace").decode()
            axis.set_title(title, fontsize=10, parse_math=False)
            axis.set_xlabel("nodes a step")
            axis.set_ylabel("EDL, tokens a step")
            axis.set_xlim(left=0)
            axis.set_ylim(bottom=1)
            axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
