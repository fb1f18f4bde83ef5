"""Argument types, checks and the output that several command lines share."""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lookahead_vllm.draft.options import LookaheadOptions, OptionError, allowed_values

PLOT_TYPES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")
"""The endings of names that --plot takes; matplotlib writes files of each of these types."""


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def positives(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas; duplicates are dropped."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def ngrams(text: str) -> int:
    """A number of n-grams, however the server would read it; its range is checked later."""
    try:
        return int(text)
    except ValueError:
        allowed, default = allowed_values("max_nodes"), LookaheadOptions.max_nodes
        try:
            return int(allowed.read("max_nodes", text, default))
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def escape_unprintable() -> None:
    """Let `print` write escapes for characters that standard output cannot encode.

    Names of files and categories may have such characters, and no results may be lost for them.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def check_output(path: Path, error: type[ValueError]) -> None:
    """Raise `error` if no file can be written at `path` after the run."""
    try:
        if not path.parent.is_dir():
            raise error(f"there is no folder {path.parent} to write {path.name} in")
        if path.is_dir():
            raise error(f"{path} is a folder; write the name of a file in it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise error(f"this user may not write {path}; write another name")
    except OSError as reason:  # the name is too long, for example
        raise error(f"{path} cannot be written: {reason.strerror}") from None


def check_outputs(options: argparse.Namespace, error: type[ValueError]) -> None:
    """Raise `error` if the files of --json and --plot cannot be written after the run."""
    for path in (options.json, options.plot):
        if path:
            check_output(path, error)
    if options.plot:
        if options.plot.suffix.lower() not in PLOT_TYPES:
            types = f"{', '.join(PLOT_TYPES[:-1])} or {PLOT_TYPES[-1]}"
            raise error(f"--plot {options.plot}: the name must end in {types}")
        try:
            version("matplotlib")
        except PackageNotFoundError:
            raise error("--plot needs matplotlib: pip install matplotlib") from None
