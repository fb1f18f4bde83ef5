"""What the command lines of the benchmarks share."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def key_value(text: str) -> tuple[str, Any] | None:
    """`KEY=VALUE` with a value in JSON, or else a string; None if it is no such thing."""
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        return None
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def check_outputs(options: argparse.Namespace, error: type[ValueError]) -> None:
    """Raise `error` where what --json or --plot ask for could not be written in the end."""
    for path in (options.json, options.plot):
        if path and not path.parent.is_dir():
            raise error(f"there is no folder {path.parent} to write {path.name} in")
    if options.plot:
        try:
            version("matplotlib")
        except PackageNotFoundError:
            raise error("--plot needs matplotlib: pip install matplotlib") from None
