"""A C++ compiler that is quick because it does not optimize."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def quick_compiler() -> Iterator[str]:
    """The path of a compiler, for `$CXX`, that any user may run; it is deleted after the block."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "c++"
        path.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@" -O0\n')
        path.chmod(0o755)
        yield str(path)
