"""Results of a simulation as a picture."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.simulation.tables import Results


def check() -> None:
    """Raise OptionError if nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install matplotlib")


def draw(results: Results, path: Path) -> None:
    """Draw tokens a step: by budget, and with the largest one by category; the first mode only."""
    import_module("matplotlib").use("agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(results)
    for at, (proposer, budgets) in enumerate(results.items()):
        entries = [next(iter(modes.values())) for modes in budgets.values()]
        left.plot([int(budget) for budget in budgets], [one["edl"] for one in entries], "o-")
        figures = entries[-1]["by_category"]
        places = [place + at * width for place in range(len(figures))]
        right.bar(places, [one["edl"] for one in figures.values()], width, label=proposer)
        right.set_xticks(range(len(figures)), figures, rotation=30, ha="right")
    left.set_xlabel("nodes a step, at most")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_ylabel("tokens a step")
    right.legend()
    figure.savefig(path)
