"""Files kept for later processes: replaced atomically, and set aside if they are refused."""

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

LEFTOVER_SECONDS = 3600
"""A temporary file that was not written to for so long belongs to a killed process."""


class RefusedFileError(ValueError):
    """The file is refused; the message is one sentence about it that begins with `it`."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a new file, which replaces the one at `path` at the end of the block.

    Only this user may read it. If the block fails, the old file is unchanged.

    Raises
    ------
    OSError
        The file could not be written.
    """
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # not every file system can sync a directory
        _sync_directory(path.parent)


def _remove_leftovers(path: Path) -> None:
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+-[0-9a-f]{{8}}\.tmp")
    for found in filter(name.fullmatch, os.listdir(path.parent)):
        with suppress(OSError):
            leftover = path.with_name(found)
            if time.time() - leftover.lstat().st_mtime > LEFTOVER_SECONDS:
                leftover.unlink()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it.

    Raises
    ------
    RefusedFileError
        It is not a regular file, or belongs to a user other than this one and root.
    OSError
        It is missing or cannot be read.
    """

    def opener(name: str, flags: int) -> int:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        status, user = os.fstat(file.fileno()), os.geteuid()
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFileError("it is not a regular file")
        if status.st_uid not in (user, 0):
            raise RefusedFileError(
                f"it belongs to user {status.st_uid}, and this process runs as user {user}"
            )
        yield file


def set_aside(path: Path) -> Path:
    """Rename a refused file to `NAME.refused`, which is returned; an older one is replaced.

    Raises
    ------
    OSError
        The file could not be renamed.
    """
    target = path.with_name(f"{path.name}.refused")
    os.rename(path, target)
    return target
