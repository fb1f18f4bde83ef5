"""Simulations as a picture."""

from __future__ import annotations

from pathlib import Path

from lookahead_vllm.simulation.tables import Results, lines


def plot(results: Results, path: Path) -> None:
    """Draw EDL over nodes a step: a panel for each file and mode, a line for each proposer."""
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
                found = [
                    entries_of[mode]["by_file"][file]
                    for entries_of in budgets.values()
                    if mode in entries_of
                ]
                axis.plot(
                    [one["nodes"] for one in found],
                    [one["edl"] for one in found],
                    marker="o",
                    markersize=4,
                    label=proposer,
                )
            axis.set_title(f"{Path(file).stem}, {mode}", fontsize=10)
            axis.set_xlabel("nodes a step")
            axis.set_ylabel("EDL, tokens a step")
            axis.set_xlim(left=0)
            axis.set_ylim(bottom=1)
            axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
