"""Compare the parts of vLLM that lookahead uses with a release of vLLM that is not installed.

The comparison reads sources: it cannot tell whether they still do the same. A release is supported
once the tests pass with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from lookahead_vllm.engine import compatibility

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
    """One sentence for each thing that this release lacks."""
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
        print(f"{place.name}: {len(missing)} differences")
        for problem in missing:
            print(f"  {problem}")
    return 1 if found else 0
