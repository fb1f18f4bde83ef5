"""Check whether lookahead works here: this machine, this vLLM, this GPU."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Sequence

from lookahead_vllm.cli import findings

EPILOG = """\
The rows are `ok`, `note` (works, but slower than it could be, or untested) or `FAILS` (lookahead
cannot run). No engine is started and no model is loaded; kernels are compiled for this machine,
which takes up to a minute the first time and saves a server that time. Run it as you run the
server, with the same environment variables.

The exit status is 0 if it works, 1 if not, 2 for wrong arguments.
"""
TITLE_WIDTH = 18
STATUS_WIDTH = 7


def parser() -> argparse.ArgumentParser:
    """The command line."""
    return argparse.ArgumentParser(
        prog="lookahead-vllm check",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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


def main(argv: Sequence[str]) -> int:
    """Run the check; `--help` explains the exit status."""
    parser().parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    return check_machine()
