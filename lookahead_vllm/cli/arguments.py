"""Argument types, checks and the output that several command lines share."""

import argparse
import io
import os
import sys
from pathlib import Path


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        if 0 < (value := float(text)) < float("inf"):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def escape_unprintable() -> None:
    """Let `print` write escapes for characters that standard output cannot encode.

    Names of files and categories may have such characters, and no results may be lost for them.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def first_line(error: Exception) -> str:
    """What an error says, as one line; its type if it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


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
