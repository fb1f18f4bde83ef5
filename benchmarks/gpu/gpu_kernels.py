"""The kernel checks of gpu_check.py, spread over processes: compiling takes most of their time.

    python benchmarks/gpu/gpu_kernels.py REPOSITORY OUT.json [PROCESSES]

A case that raises is reported like a wrong one, and the others go on. Each process writes a row to
its `.part` file once it is known. The exit status is 0 if all
cases are right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MAX_PROCESSES = 12
MAX_REASON_CHARACTERS = 500


def check_share(number: int, processes: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of every `processes`-th case, from case `number` on.

    Each case seeds its random numbers, so it does not matter which process checks it.
    """
    from benchmarks.gpu.accuracy import accuracy_row
    from benchmarks.gpu.case import IMPLS, kernel_cases

    for index, (name, case) in enumerate(kernel_cases()):
        if index % processes != number:
            continue
        for impl in IMPLS:
            try:
                row = accuracy_row(name, case, impl)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]
                row = {"case": name, "impl": impl, "raised": reason}
                traceback.print_exc()
            yield {**row, "number": index}


def check_in_processes(repository: Path, out: Path, processes: int) -> tuple[list[Any], int]:
    """The rows of all processes, in the order of the cases, and how many processes failed."""
    parts = [out.with_suffix(f".{number}.part") for number in range(processes)]
    command = [sys.executable, __file__, str(repository)]
    running = [
        subprocess.Popen([*command, str(part), str(processes), str(number)])
        for number, part in enumerate(parts)
    ]
    failed = sum(process.wait() != 0 for process in running)
    lines = [line for part in parts if part.is_file() for line in part.open()]
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    for part in parts:
        part.unlink(missing_ok=True)
    return sorted(rows, key=lambda row: (row["number"], row["impl"])), failed


def report(rows: Sequence[dict[str, Any]], failed: int) -> bool:
    """Print what is wrong and a line for each implementation; whether all is right."""
    from benchmarks.gpu.accuracy import describe, is_wrong, largest_share

    wrong = [row for row in rows if is_wrong(row)]
    for row in wrong:
        print(describe(row))
    for impl in sorted({row["impl"] for row in rows}):
        checked = [row for row in rows if row["impl"] == impl and "error" in row]
        share = largest_share(checked)
        print(f"{impl}: {len(checked)} cases, the largest error at {share:.2f} of what is allowed")
    print(f"{len(wrong)} wrong, processes that failed: {failed}")
    return bool(rows) and not wrong and not failed


def main(argv: Sequence[str]) -> int:
    """Check all cases; with a fourth argument, those of one process."""
    repository, out = Path(argv[0]), Path(argv[1])
    processes = int(argv[2]) if len(argv) > 2 else min(MAX_PROCESSES, os.cpu_count() or 1)
    sys.path.insert(0, str(repository))
    if len(argv) > 3:
        with out.open("w") as file:
            for row in check_share(int(argv[3]), processes):
                file.write(json.dumps(row) + "\n")
                file.flush()  # what is known, if the machine's time ends
        return 0
    rows, failed = check_in_processes(repository, out, processes)
    out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if report(rows, failed) else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
