"""Argument types and checks that several command lines share."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def positives(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas; duplicates are dropped."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def check_outputs(options: argparse.Namespace, error: type[ValueError]) -> None:
    """Raise `error` if the files of --json and --plot cannot be written after the run."""
    for path in (options.json, options.plot):
        if path and not path.parent.is_dir():
            raise error(f"there is no folder {path.parent} to write {path.name} in")
    if options.plot:
        try:
            version("matplotlib")
        except PackageNotFoundError:
            raise error("--plot needs matplotlib: pip install matplotlib") from None
