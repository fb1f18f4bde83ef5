"""Where what is compiled on a user's machine is kept for later processes."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(f"vllm.{__name__}")

_ROOT = "LOOKAHEAD_VLLM_CACHE"
_NAME = "lookahead_vllm"
_PROBE = b"\0" * 65536  # a disk that takes so much is not full


@functools.cache
def cache_dir() -> Path:
    """The folder `lookahead_vllm` in `$LOOKAHEAD_VLLM_CACHE`, `$XDG_CACHE_HOME` or `~/.cache`.

    It is made if there is none, for this user alone: code that is loaded lies in it. One that
    cannot be written, or that somebody else could write to, is not used. Then it is a temporary
    one, which the processes that this one starts share, and which goes when this one ends; the log
    says so once.

    Raises
    ------
    OSError
        There is no place for a temporary one either.
    """
    try:
        return _kept()
    except (OSError, RuntimeError) as error:
        directory = _temporary()
        logger.warning(
            "Lookahead's compiled kernels are not kept for the next start: %s. They are compiled "
            "in %s now; set %s to a folder of your own that can be written.",
            str(error).rstrip("."),
            directory,
            _ROOT,
        )
        return directory


def share_cache_dir() -> None:
    """In the process that starts all others: choose the folder for them, too."""
    try:
        cache_dir()
    except OSError as error:
        logger.warning("Lookahead's kernels are compiled anew by every process: %s.", error)


def _kept() -> Path:
    """Raises OSError, or RuntimeError where there is no home."""
    root = os.environ.get(_ROOT) or os.environ.get("XDG_CACHE_HOME")
    directory = (Path(root) if root else Path.home() / ".cache") / _NAME
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o022:
        raise PermissionError(f"others may write to {directory}; run chmod 700 {directory}")
    _probe(directory)
    return directory


def _temporary() -> Path:
    root = temporary_root()
    os.environ[_ROOT] = str(root)  # for the processes that this one starts
    creator = os.getpid()

    def remove() -> None:
        if os.getpid() == creator:  # and no fork of it
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    directory = root / _NAME
    directory.mkdir(mode=0o700)
    return directory


def temporary_root() -> Path:
    """A new folder, in memory where no disk has room.

    Raises
    ------
    OSError
        It cannot be made.
    """
    problem: OSError | None = None
    for parent in _parents():
        try:
            root = Path(tempfile.mkdtemp(prefix="lookahead_vllm-", dir=parent))
        except OSError as error:
            problem = error
            continue
        try:
            _probe(root)
        except OSError as error:
            problem = error
            root.rmdir()
            continue
        return root
    raise problem or OSError("there is no folder for temporary files")


def _parents() -> Iterator[str]:
    with suppress(OSError):  # none can be written
        yield tempfile.gettempdir()
    yield "/dev/shm"


def _probe(directory: Path) -> None:
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(_PROBE)
