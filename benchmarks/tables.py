"""Rows of a benchmark as Markdown tables."""

from collections.abc import Callable, Sequence

from benchmarks.engines.rows import NO_FIGURES, Figures, Row, mean_and_error
from lookahead_vllm.simulation.markdown import MISSING, markdown, number


def with_spread(value: float | None, runs: Sequence[float], digits: int) -> str:
    """A median; with two or more runs, their smallest and largest in brackets."""
    if len(runs) < 2:
        return number(value, digits)
    return f"{number(value, digits)} ({number(min(runs), digits)}–{number(max(runs), digits)})"


def main_table(rows: Sequence[Row], check_exact: bool) -> str:
    """One line for each method and batch size; below, the reasons of failures."""
    head = ["method", "batch", "full", "tokens/s", "ratio", "steps", "tokens/step", "acceptance"]
    head.append("drafted")
    if check_exact:
        head.append("differing")
    body = []
    for row in rows:
        line = [row["method"], str(row["batch_size"])]
        if row["tokens_per_s"] is None or row["full"] is None:
            body.append([*line, MISSING, "failed", *[MISSING] * (len(head) - 4)])
            continue
        line += [
            f"{row['full']:.0%}",
            with_spread(row["tokens_per_s"], row["tokens_per_s_runs"], 1),
            with_spread(row["ratio"], row["ratio_runs"], 2),
            number(row["steps"], 0),
            number(row["tokens_per_step"]),
            number(row["acceptance_length"]),
            number(row["draft_tokens_per_step"]),
        ]
        body.append([*line, number(row["mismatches"], 0)] if check_exact else line)
    failures = [
        f"failed: {row['method']}, batch {row['batch_size']}: {row['error']}"
        for row in rows
        if row["error"]
    ]
    return "\n".join([markdown(head, body), *failures])


def category_tables(rows: Sequence[Row]) -> str:
    """Tokens a step by category, and the ratio at batch size 1; "" for a single category."""
    finished = [row for row in rows if row["tokens_per_s"] is not None]
    categories = list(dict.fromkeys(name for row in finished for name in row["by_category"]))
    if len(categories) < 2:
        return ""

    def table(title: str, chosen: Sequence[Row], pick: Callable[[Figures], float | None]) -> str:
        body = [
            [
                f"{row['method']}, batch {row['batch_size']}",
                *(number(pick(row["by_category"].get(name, NO_FIGURES))) for name in categories),
            ]
            for row in chosen
        ]
        return markdown([title, *categories], body)

    tables = [table("tokens/step", finished, lambda figures: figures["tokens_per_step"])]
    alone = [row for row in finished if row["batch_size"] == 1 and row["ratio"] is not None]
    if alone:
        tables.append(table("ratio", alone, lambda figures: figures["ratio"]))
    return "\n\n".join(tables)


def turn_table(rows: Sequence[Row]) -> str:
    """The mean over the turns and its standard error; "" without two turns."""
    body = [
        [
            f"{row['method']}, batch {row['batch_size']}",
            _mean(row["ratio_runs"], 2),
            _mean(row["tokens_per_step_runs"], 2),
        ]
        for row in rows
        if len(row["tokens_per_s_runs"]) > 1
    ]
    return markdown(["mean of the turns", "ratio", "tokens/step"], body) if body else ""


def _mean(values: Sequence[float], digits: int) -> str:
    if len(values) < 2:
        return MISSING
    middle, error = mean_and_error(values)
    return f"{number(middle, digits)} ± {number(error, digits)}"


def verdicts(rows: Sequence[Row]) -> str:
    """Whether lookahead is ahead of each other method, by the turns that both have taken."""
    lines = []
    for ours in rows:
        for other in rows:
            name, method, size = ours["method"], other["method"], ours["batch_size"]
            sides = (ours["tokens_per_s_runs"], other["tokens_per_s_runs"])
            alike = size == other["batch_size"]
            if name != "lookahead" or method == name or not alike or min(map(len, sides)) < 2:
                continue
            ratios = [a / b for a, b in zip(*sides, strict=False)]
            place = f"{name} over {method}, batch {size}"
            lines.append(f"{place}: {_mean(ratios, 2)}, {verdict(ratios)}")
    return "\n".join(lines)


def verdict(ratios: Sequence[float]) -> str:
    """ "ahead" or "behind" if the 95% interval of Student's t excludes 1, else "level"."""
    middle, error = mean_and_error(ratios)
    z, freedom = 1.96, len(ratios) - 1
    # The first terms of the quantile's expansion in 1 / freedom, which few turns need exactly.
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    quantile = {1: 12.706, 2: 4.303, 3: 3.182}.get(freedom, quantile)
    if abs(middle - 1) <= quantile * error:
        return "level"
    return "ahead" if middle > 1 else "behind"
