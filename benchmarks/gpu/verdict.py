"""Read the JSON files of a GPU's checks and benchmarks.

python benchmarks/gpu/verdict.py ran FILE       status 0 if every method ran at every batch size
python benchmarks/gpu/verdict.py exact FILE     status 0 if, besides, no answer differs
python benchmarks/gpu/verdict.py tables FOLDER  prints all results in the folder, line by line
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Lines = Iterator[str]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that scripts/bench.py wrote."""
    return list(json.loads(path.read_text())["rows"])


def ran(path: Path) -> int:
    """1 if a method has no speed at a batch size, else 0."""
    missing = [row for row in rows_of(path) if not row["tokens_per_s"]]
    for row in missing:
        print(f"did not run: {row['method']}, batch {row['batch_size']}")
    return 1 if missing else 0


def exact(path: Path) -> int:
    """1 if a method did not run or an answer differs, else 0."""
    status = ran(path)
    for row in rows_of(path):
        if row["mismatches"]:
            print(f"{row['method']}: {row['mismatches']} of {row['prompts']} answers differ")
            status = 1
    return status


def kernel_lines(rows: list[dict[str, Any]]) -> Lines:
    """Of gpu_kernels.py."""
    wrong = [r for r in rows if "raised" in r or ("error" in r and not r["error"] < r["bound"])]
    yield f"kernels: {len(rows)} cases, {len(wrong)} wrong"


def plain_lines(levels: dict[str, dict[str, Any]]) -> Lines:
    """Of plain.py."""
    for name, result in levels.items():
        one, eight = result.get("one", {}), result.get("eight", {})
        yield (
            f"plain, level '{name}': code {result['code']}, {result['seconds']:.0f} s, "
            f"tokens/s {one.get('tokens_per_s', 0):.0f} alone, "
            f"{eight.get('tokens_per_s', 0):.0f} of eight; "
            f"as recorded {result.get('as_recorded')}; {str(result.get('text'))[:80]!r}"
        )


def timing_lines(results: dict[str, Any]) -> Lines:
    """Of gpu_check.py --only timings."""
    for row in results.get("timings", []):
        both = row["triton"] and row["flash"]
        ratio = row["triton"] / row["flash"] if both else float("nan")
        yield (
            f"timings: {row['requests']:3} requests, context {row['context']:6}, "
            f"{row['nodes']:4} nodes: floor {row['floor']:.3f}, flash {row['flash'] or 0:.3f}, "
            f"triton {row['triton'] or 0:.3f} ms, ratio {ratio:.2f}"
        )


def serving_lines(results: dict[str, Any]) -> Lines:
    """Of `vllm bench serve`."""
    keys = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
    yield f"serve: { {key: results.get(key) for key in keys} }"


def benchmark_lines(name: str, results: dict[str, Any]) -> Lines:
    """Of scripts/bench.py; nothing for files that have no rows."""
    for row in results.get("rows", []):
        yield (
            f"{name}: batch {row['batch_size']:3} {row['method']:10} "
            f"{row['tokens_per_s'] or 0:8.0f} tokens/s, ratio {row['ratio'] or 0:.2f}, "
            f"{row['tokens_per_step'] or 0:.2f} tokens/step, "
            f"{row['draft_tokens_per_step'] or 0:.1f} drafted, differing {row['mismatches']}"
            + (f"; {row['error']}" if row.get("error") else "")
        )


LINES: dict[str, Callable[[Any], Lines]] = {
    "kernels.json": kernel_lines,
    "plain.json": plain_lines,
    "timings.json": timing_lines,
    "serve.json": serving_lines,
}


def tables(folder: Path) -> int:
    """Print the results in all JSON files; one that cannot be read gets a line that says so."""
    for path in sorted(folder.glob("*.json")):
        try:
            results = json.loads(path.read_text())
            if path.name in LINES:
                lines = LINES[path.name](results)
            else:
                lines = benchmark_lines(path.stem, results)
            for line in lines:
                print(line)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            print(f"{path.name}: cannot be read: {error!r}")
    return 0


COMMANDS = {"ran": ran, "exact": exact, "tables": tables}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    sys.exit(COMMANDS[sys.argv[1]](Path(sys.argv[2])))
