"""Every implementation of tree attention against float64."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.gpu.case import IMPLS, Case, kernel_cases


def accuracy_row(name: str, case: Case, impl: str) -> dict[str, Any]:
    """`error` and `bound` of a case, or `left_out`: why the implementation cannot do it."""
    try:
        error = case.error(impl)
    except ValueError as reason:
        return {"case": name, "impl": impl, "left_out": str(reason)}
    return {"case": name, "impl": impl, "error": error, "bound": case.max_error}


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a row's error is NaN or not below the bound."""
    return "error" in row and not row["error"] < row["bound"]


def check_kernels(results: dict[str, Any]) -> bool:
    """Check all cases, one after the other; whether none is wrong. `results` gets the rows."""
    rows: list[dict[str, Any]] = []
    results["kernels"] = rows
    for name, case in kernel_cases():
        for impl in IMPLS:
            row = accuracy_row(name, case, impl)
            rows.append(row)
            if is_wrong(row):
                found = f"{row['error']:.2e}, where {row['bound']:.0e} is allowed"
                print(f"WRONG: {impl}, {name}: {found}")
    for impl in IMPLS:
        checked = [row for row in rows if row["impl"] == impl and "error" in row]
        left_out = sum(row["impl"] == impl for row in rows) - len(checked)
        share = max((row["error"] / row["bound"] for row in checked), default=math.nan)
        print(
            f"{impl}: {len(checked)} cases right to within {share:.2f} of what is allowed, "
            f"{left_out} left out"
        )
    return not any(map(is_wrong, rows))
