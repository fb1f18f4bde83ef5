"""The folder that keeps code compiled on this machine for later processes."""

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(f"vllm.{__name__}")

_ROOT_VARIABLE = "LOOKAHEAD_VLLM_CACHE"
_NAME = "lookahead_vllm"
_PROBE_BYTES = 65536
"""A disk that cannot take this many bytes counts as full."""


@functools.cache
def cache_dir() -> Path:
    """The folder `lookahead_vllm` in `$LOOKAHEAD_VLLM_CACHE`, `$XDG_CACHE_HOME` or `~/.cache`.

    It holds code that is loaded and run, so it is created for this user only. A folder that is
    not writable, or that another user may write to, is not used. A temporary folder replaces it,
    with one warning; child processes share that folder, and it is removed when this process ends.

    Raises
    ------
    OSError
        A temporary folder could not be created either.
    """
    try:
        return _persistent_folder()
    except (OSError, RuntimeError) as error:
        directory = _temporary_folder()
        logger.warning(
            "Lookahead's compiled kernels are not kept for the next start: %s. They are compiled "
            "in %s now; set %s to a folder of your own that can be written.",
            str(error).rstrip("."),
            directory,
            _ROOT_VARIABLE,
        )
        return directory


def sources_of_kernels(package: Path) -> list[Path]:
    """All modules of the folders that may hold kernels, subfolders included."""
    folders = "draft", "verify", "engine/cpu_kernels"
    return sorted(source for folder in folders for source in (package / folder).rglob("*.py"))


def share_cache_dir() -> None:
    """Choose the folder in the parent process, so that its child processes use the same one."""
    try:
        cache_dir()
    except OSError as error:
        logger.warning("Lookahead's kernels are compiled anew by every process: %s.", error)


def _persistent_folder() -> Path:
    """Raises OSError if it cannot be used safely, RuntimeError if the user has no home."""
    root = os.environ.get(_ROOT_VARIABLE) or os.environ.get("XDG_CACHE_HOME")
    directory = (Path(root) if root else Path.home() / ".cache") / _NAME
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o022:
        raise PermissionError(f"others may write to {directory}; run chmod 700 {directory}")
    _check_writable(directory)
    return directory


def _temporary_folder() -> Path:
    root = Path(tempfile.mkdtemp(prefix="lookahead_vllm-"))
    os.environ[_ROOT_VARIABLE] = str(root)  # for child processes
    creator = os.getpid()

    def remove() -> None:
        if os.getpid() == creator:  # not in a fork
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    directory = root / _NAME
    directory.mkdir(mode=0o700)
    return directory


def _check_writable(directory: Path) -> None:
    """Write a small temporary file; OSError if that fails."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(_PROBE_BYTES))
