"""Compare the parts of vLLM that lookahead uses with a release of vLLM that is not installed."""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from lookahead_vllm.engine import compatibility
from lookahead_vllm.engine.seams import SEAMS

EXPLANATION = """\
Names and parameters of the tables in lookahead_vllm/engine/seams/ are compared, and everything
that lookahead imports from vLLM, as at every start of an engine with lookahead. The comparison
reads sources: it cannot tell whether they still do the same. A release is supported once the tests
pass with it.
"""
EPILOG = f"""\
{EXPLANATION}
examples:
  pip download --no-deps vllm==0.33.0 && python scripts/check_seams.py vllm-0.33.0-*.whl
  python scripts/check_seams.py path/to/a/checkout/of/vllm

The exit status is 0 if everything is there, 1 if something is missing, 2 for wrong arguments.
"""


_DAMAGED = (
    OSError,
    EOFError,
    RuntimeError,
    SyntaxError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def release(text: str) -> Path:
    """Argument type: a wheel of vLLM, or a folder that holds the package `vllm`."""
    path = Path(text)
    if not (zipfile.is_zipfile(path) or (path / "vllm").is_dir()):
        raise argparse.ArgumentTypeError(
            f"{path} is no wheel, and no folder with the package `vllm` in it"
        )
    return path


def compare(place: Path) -> list[str]:
    """One sentence for each difference between the tables and this release."""
    if place.is_dir():
        return list(compatibility.problems(place))
    with zipfile.ZipFile(place) as wheel, tempfile.TemporaryDirectory() as folder:
        sources = [name for name in wheel.namelist() if name.endswith(".py")]
        wheel.extractall(folder, sources)
        return list(compatibility.problems(Path(folder)))


def report(places: Sequence[Path]) -> int:
    """Print the differences of each release; 1 if there are any, 2 if one is damaged, else 0."""
    found = 0
    for place in places:
        try:
            missing = compare(place)
        except _DAMAGED as error:
            print(f"{place} cannot be read, and may be damaged: {error}", file=sys.stderr)
            return 2
        found += len(missing)
        print(f"{place.name}: {len(SEAMS)} places, {len(missing)} differ")
        for problem in missing:
            print(f"  {problem}")
    return 1 if found else 0


def main(argv: Sequence[str]) -> int:
    """The command line of scripts/check_seams.py; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "places", nargs="+", type=release, metavar="WHEEL", help="wheels, or folders that hold vllm"
    )
    return report(parser.parse_args(argv).places)
