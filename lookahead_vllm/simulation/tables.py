"""Tables of simulation results, in Markdown."""

from collections.abc import Callable, Mapping
from pathlib import Path

from lookahead_vllm.simulation.markdown import markdown, number
from lookahead_vllm.simulation.replay import Entry, Figures, Mode

Results = dict[str, dict[str, dict[Mode, Entry]]]
"""Entries by proposer, budget (a string, as it is a key in JSON) and mode."""


def lines(results: Results) -> list[tuple[str, str, Mode, Entry]]:
    """Every entry, with its proposer, budget and mode."""
    return [
        (proposer, budget, mode, entry)
        for proposer, budgets in results.items()
        for budget, modes in budgets.items()
        for mode, entry in modes.items()
    ]


def overall_table(results: Results) -> str:
    """A table with a line for each proposer, budget and mode."""
    head = ["proposer", "budget", "mode", "EDL", "nodes", "propose µs", "p99", "update µs"]
    entries = lines(results)
    has_speedup = any(entry["speedup"] is not None for *_, entry in entries)
    head += ["speed-up"] * has_speedup
    body = []
    for proposer, budget, mode, entry in entries:
        line = [
            proposer,
            budget,
            mode,
            number(entry["edl"]),
            number(entry["nodes"], 1),
            number(entry["propose_us_p50"], 1),
            number(entry["propose_us_p99"], 1),
            number(entry["update_us_p50"], 2),
        ]
        body.append(line + [number(entry["speedup"])] * has_speedup)
    return markdown(head, body)


def by_file(entry: Entry) -> Mapping[str, Figures]:
    """The figures of each file, by file name, or by path if two names are equal."""
    files = entry["by_file"]
    names = [Path(path).name for path in files]
    return dict(zip(names, files.values(), strict=True)) if len({*names}) == len(files) else files


def parts_table(
    results: Results, title: str, parts: Callable[[Entry], Mapping[str, Figures]]
) -> str:
    """A table of EDL and nodes a step with a column for each part; empty for a single part."""
    entries = lines(results)
    columns = list(dict.fromkeys(name for *_, entry in entries for name in parts(entry)))
    if len(columns) < 2:
        return ""
    body = []
    for proposer, budget, mode, entry in entries:
        cells = [parts(entry).get(name) for name in columns]
        body.append(
            [
                f"{proposer}, {budget}, {mode}",
                *(f"{cell['edl']:.2f} ({cell['nodes']:.1f})" if cell else "–" for cell in cells),
            ]
        )
    return markdown([title, *columns], body)
