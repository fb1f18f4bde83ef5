"""Compare what lookahead uses of vLLM with a release of vLLM that is not installed."""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from lookahead_vllm.engine import compatibility
from lookahead_vllm.engine.seams.table import SEAMS

EPILOG = """\
Names and parameters of the table in lookahead_vllm/engine/seams/ are compared, and all that is
imported from vLLM, as at every start of an engine with lookahead. That they are there does not say
that they mean the same: a release is supported once its tests pass.

examples:
  pip download --no-deps vllm==0.33.0 && python scripts/check_seams.py vllm-0.33.0-*.whl
  python scripts/check_seams.py path/to/a/checkout/of/vllm

The exit status is 0 if everything is there, 1 if something is not, 2 for wrong arguments.
"""


def compare(place: Path) -> list[str]:
    """What a wheel, or a folder with the package `vllm` in it, does not have."""
    if place.is_dir():
        return list(compatibility.problems(place))
    with zipfile.ZipFile(place) as wheel, tempfile.TemporaryDirectory() as folder:
        sources = [name for name in wheel.namelist() if name.endswith(".py")]
        wheel.extractall(folder, sources)
        return list(compatibility.problems(Path(folder)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "places", nargs="+", type=Path, metavar="WHEEL", help="wheels, or folders that hold `vllm`"
    )
    places = parser.parse_args(argv).places
    for place in places:
        if not (zipfile.is_zipfile(place) or (place / "vllm").is_dir()):
            parser.error(f"{place} is no wheel, and no folder with the package `vllm` in it")
    found = 0
    for place in places:
        missing = compare(place)
        found += len(missing)
        print(f"{place.name}: {len(SEAMS)} places, {len(missing)} differ")
        for problem in missing:
            print(f"  {problem}")
    return 1 if found else 0
