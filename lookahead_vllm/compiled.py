"""Where what is compiled on a user's machine is kept for later processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder `lookahead_vllm` in `$LOOKAHEAD_VLLM_CACHE`, `$XDG_CACHE_HOME` or `~/.cache`.

    It is made if there is none, for this user alone: code that is loaded lies in it.

    Raises
    ------
    OSError
        It cannot be made.
    """
    root = os.environ.get("LOOKAHEAD_VLLM_CACHE") or os.environ.get("XDG_CACHE_HOME")
    directory = (Path(root) if root else Path.home() / ".cache") / "lookahead_vllm"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
