"""Check whether lookahead works here: this machine, this vLLM, this GPU."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

EPILOG = """\
The rows are `ok`, `note` (works, but slower than it could be, or untested) or `FAILS` (lookahead
cannot run). No engine is started and no model is loaded; kernels are compiled for this machine,
which takes up to a minute the first time and saves a server that time. Run it as you run the
server, with the same environment variables.

examples:
  lookahead-vllm check
  lookahead-vllm check --patches
  pip download --no-deps vllm==0.33.0 && lookahead-vllm check --wheel vllm-0.33.0-*.whl

The exit status is 0 if it works, 1 if not (with --wheel: if something is missing), 2 for wrong
arguments.
"""
TITLE_WIDTH = 18
STATUS_WIDTH = 7


def _release(text: str) -> Path:
    """Argument type: see `check_seams.release`, which is imported only if it is needed."""
    from lookahead_vllm.cli import check_seams

    return check_seams.release(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="lookahead-vllm check",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = result.add_mutually_exclusive_group()
    group.add_argument(
        "--patches", action="store_true", help="list the places of vLLM that lookahead patches"
    )
    group.add_argument(
        "--wheel",
        nargs="+",
        type=_release,
        metavar="WHEEL",
        help="instead compare what lookahead uses of vLLM with releases that are not installed: "
        "wheels, or folders that hold the package `vllm`",
    )
    return result


def print_row(title: str, status: str, text: str) -> None:
    """One row of the table, wrapped to the terminal; 100 columns without one."""
    indent = TITLE_WIDTH + STATUS_WIDTH
    width = max(shutil.get_terminal_size((100, 24)).columns, indent + 40)
    lines = textwrap.wrap(text, width - indent, break_long_words=False) or [""]
    print(f"{title:{TITLE_WIDTH}}{status:{STATUS_WIDTH}}{lines[0]}", flush=True)
    for line in lines[1:]:
        print(" " * indent + line, flush=True)


def check_machine() -> int:
    """Print the table and the verdict; 0 if no row fails, else 1."""
    from lookahead_vllm.cli import findings

    failed, noted = [], []
    for row in findings.rows():
        finding = findings.look(row)
        print_row(row.title, *finding)
        if finding.status == "FAILS":
            failed.append(row.title)
        elif finding.status == "note":
            noted.append(row.title)
    if failed:
        print(f"\nlookahead does not work here: {', '.join(failed)}")
        return 1
    notes = f"; see the notes on {', '.join(noted)}" if noted else ""
    print(f"\nnothing here stops lookahead, on {findings.device_type().upper()}{notes}")
    return 0


def print_patches() -> None:
    """Every place that lookahead replaces in vLLM, with its purpose."""
    from lookahead_vllm.engine.seams import SEAMS

    patches = [seam for seam in SEAMS if seam.is_patch]
    print(
        f"lookahead replaces {len(patches)} places of vLLM, and extends "
        f"{len(SEAMS) - len(patches)} by subclasses.\n"
        "`wrapped` ones stay replaced; `swapped` ones are replaced while one function runs.\n"
        "A process that does not enable lookahead has the patches of EngineArgs only.\n"
    )
    for seam in patches:
        for place in seam.places:
            print(f"{seam.use:8} {place}")
        releases = f" (only vLLM {', '.join(seam.releases)})" if seam.releases else ""
        lines = [f"{seam.why}{releases}", f"until {seam.until}"]
        for line in lines:
            print(textwrap.fill(line, 100, initial_indent=" " * 9, subsequent_indent=" " * 9))


def main(argv: Sequence[str]) -> int:
    """Run the check; `--help` explains the exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    if options.wheel:
        from lookahead_vllm.cli import check_seams

        return check_seams.report(options.wheel)
    if options.patches:
        print_patches()
        return 0
    return check_machine()
