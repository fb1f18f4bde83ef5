"""Tree attention in all its cases against float64, and the other kernels."""

import math
import os
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.case import IMPLS, Case, kernel_cases
from benchmarks.gpu.processes import TIME_IS_UP, in_processes

MAX_PROCESSES = 6
OTHERS = "other kernels"
"""In place of an implementation of tree attention."""


def accuracy_row(make: Callable[[], Case], impl: str) -> dict[str, Any]:
    """`error` and `bound` of a case, or `left_out`: why the implementation cannot do it."""
    case = make()
    try:
        error = case.error(impl)
    except ValueError as reason:
        return {"left_out": str(reason)}
    return {"error": error, "bound": case.max_error}


@cache
def checks() -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Implementation, case, and the function that checks it."""
    found: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        (impl, name, partial(accuracy_row, make, impl))
        for name, make in kernel_cases()
        for impl in IMPLS
    ]
    try:
        from benchmarks.gpu import other_kernels
    except ImportError as reason:
        said = f"it needs the project's tests and what they import: {reason}"
        return [*found, (OTHERS, "all", lambda: {"left_out": said})]
    return [*found, *((OTHERS, name, check) for name, check in other_kernels.checks())]


def run(index: int) -> dict[str, Any]:
    """The row of one of the `checks`, without its names."""
    _, _, check = checks()[index]
    start = time.perf_counter()
    try:
        row = check()
    except Exception as error:
        traceback.print_exc()
        row = {"raised": f"{type(error).__name__}: {error}"[:500]}
    return {"seconds": time.perf_counter() - start, **row}


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a check raised, or an error is NaN or not below its bound."""
    return "raised" in row or ("error" in row and not row["error"] < row["bound"])


def check_kernels(results: dict[str, Any], save: Callable[[], None], seconds: float | None) -> bool:
    """Check all cases in several processes, as compiling takes the time; whether all are right.

    `results` gets the rows, and `save` is called after each. It ends after so many seconds.
    """
    rows: list[dict[str, Any]] = []
    results["kernels"] = rows
    count = len(checks())
    processes = min(MAX_PROCESSES, os.cpu_count() or 1)
    # The others first: each takes longer.
    done = in_processes(run, range(count)[::-1], processes, seconds)
    for index, found in tqdm(done, "kernels", count, leave=False):
        impl, name, _ = checks()[index]
        row = {"impl": impl, "case": name, **found}
        rows.append(row)
        save()
        if is_wrong(row):
            tqdm.write(f"WRONG: {impl}, {name}: {_reason(row)}")
        elif "stopped" in row:
            tqdm.write(f"stopped on its way: {impl}, {name}")
    for impl in (*IMPLS, OTHERS):
        print(_summary(impl, [row for row in rows if row["impl"] == impl]))
    if len(rows) < count:
        print(f"{count - len(rows)} checks not begun: {TIME_IS_UP}")
    ended = sum("stopped" not in row for row in rows)
    return ended == count and not any(map(is_wrong, rows))


def _reason(row: dict[str, Any]) -> str:
    if "raised" in row:
        return str(row["raised"])
    return f"{row['error']:.2e}, where {row['bound']:.0e} is allowed"


def _summary(impl: str, rows: list[dict[str, Any]]) -> str:
    left_out = sum("left_out" in row or "stopped" in row for row in rows)
    wrong = sum(map(is_wrong, rows))
    share = max((row["error"] / row["bound"] for row in rows if "error" in row), default=math.nan)
    return (
        f"{impl}: {len(rows) - wrong - left_out} right, to within {share:.2f} of what is allowed; "
        f"{wrong} wrong, {left_out} left out"
    )
