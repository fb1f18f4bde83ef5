"""How hot loops are compiled: by numba, once for every release."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numpy.typing import NDArray

from lookahead_vllm.kernel_folder import cache_dir

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` at its first call, and keep what was compiled for later processes.

    numba looks at the file of a kernel alone when it asks whether a compiled one still fits, and
    not at the files of the kernels that are inlined into it. So each state of the sources of
    `draft/` and `verify/` has a folder of its own in
    `compiled.cache_dir()`. Where there is none, every process compiles for itself.
    """
    compiled = numba.njit(error_model="numpy")(function)
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = _folder()
        cache = _Cache(function)
    except (OSError, RuntimeError):
        return compiled
    finally:
        numba.config.CACHE_DIR = before
    # Where the folder cannot be used, numba takes one whose kernels may be of other sources.
    if cache.cache_path.startswith(_folder()):
        compiled._cache = cache  # what `enable_caching` does
    return compiled


class _Cache(FunctionCache):
    """numba's, that gives up what it cannot write: the kernel is compiled, and that is enough."""

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


def sources_of_kernels(package: Path) -> list[Path]:
    """All modules of `draft/` and `verify/`, in folders of any depth."""
    return sorted(
        source for room in ("draft", "verify") for source in (package / room).rglob("*.py")
    )


@functools.cache
def _folder() -> str:
    sources = sources_of_kernels(Path(__file__).parents[1])
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    return str(cache_dir() / f"kernels-{digest[:16]}")
