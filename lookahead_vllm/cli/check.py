"""Check whether lookahead works here: this machine, this vLLM, this GPU."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

from lookahead_vllm.cli import findings
from lookahead_vllm.engine import compatibility

EPILOG = """\
The rows are `ok`, `note` (works, but slower than it could be, or untested) or `FAILS` (lookahead
cannot run). No engine is started and no model is loaded; kernels are compiled for this machine,
which takes up to a minute the first time and saves a server that time. Run it as you run the
server, with the same environment variables.

examples:
  lookahead-vllm check
  pip download --no-deps vllm==0.33.0 && lookahead-vllm check --wheel vllm-0.33.0-*.whl

The exit status is 0 if it works, 1 if not (with --wheel: if something is missing), 2 for wrong
arguments.
"""
TITLE_WIDTH = 18
STATUS_WIDTH = 7


def _release(text: str) -> Path:
    """Argument type: a wheel of vLLM, or a folder that holds the package `vllm`."""
    path = Path(text)
    if not (zipfile.is_zipfile(path) or (path / "vllm").is_dir()):
        raise argparse.ArgumentTypeError(
            f"{path} is no wheel, and no folder with the package `vllm` in it"
        )
    return path


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="lookahead-vllm check",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--wheel",
        type=_release,
        metavar="WHEEL",
        help="instead compare what lookahead uses of vLLM with a release that is not installed: "
        "a wheel, or a folder that holds the package `vllm`",
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


def compare(place: Path) -> list[str]:
    """One sentence for each thing that lookahead uses of vLLM and this release lacks.

    The sources are read, which cannot tell whether they still do the same: a release is supported
    once the tests pass with it.
    """
    if place.is_dir():
        return list(compatibility.problems(place))
    with zipfile.ZipFile(place) as wheel, tempfile.TemporaryDirectory() as folder:
        sources = [name for name in wheel.namelist() if name.endswith(".py")]
        wheel.extractall(folder, sources)
        return list(compatibility.problems(Path(folder)))


def print_differences(place: Path) -> int:
    """Print the differences of a release; 1 if there are any, else 0."""
    missing = compare(place)
    print(f"{place.name}: {len(missing)} differences")
    for problem in missing:
        print(f"  {problem}")
    return 1 if missing else 0


def main(argv: Sequence[str]) -> int:
    """Run the check; `--help` explains the exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    if options.wheel:
        return print_differences(options.wheel)
    return check_machine()
