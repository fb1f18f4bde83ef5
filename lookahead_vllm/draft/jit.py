"""The `kernel` decorator: numba compilation with a cache on disk."""

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

from lookahead_vllm.kernel_folder import cache_dir, sources_of_kernels

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


def kernel(function: Callable[..., Any], nogil: bool = False, borrows: bool = False) -> Any:
    """Compile the decorated function with numba at its first call, and cache the code on disk.

    numba recompiles a cached kernel when the kernel's own file changes, but not when the file of
    an inlined kernel does. So the cache is a folder of `kernel_folder.cache_dir()` that is named by
    a hash of all sources that may hold kernels. If there is no usable folder, each process
    compiles for itself.
    """
    options = {"nogil": nogil, "_nrt": not borrows, "forceinline": borrows}
    compiled = numba.njit(error_model="numpy", **options)(function)
    default_folder = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = _folder()
        cache = _Cache(function)
    except (OSError, RuntimeError):
        return compiled
    finally:
        numba.config.CACHE_DIR = default_folder
    # If numba cannot write to the folder, it picks another, whose kernels may be out of date.
    if cache.cache_path.startswith(_folder()):
        compiled._cache = cache  # as `Dispatcher.enable_caching` does
    return compiled


borrowing_kernel = functools.partial(kernel, borrows=True)
"""For inner functions of a kernel that make no arrays; numba refuses those that do.

They are inlined, and the references to their arrays are not counted. A call takes seven words or
more on the stack for each array, and counting takes a locked instruction for each view of an array,
before which the processor ends all reads from memory: together half of a tree's growth. So only
another such function may call one that returns views.
"""


class _Cache(FunctionCache):
    """numba's cache, which replaces damaged files and ignores failed writes.

    In both cases the kernel is compiled in memory.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged pickle raises errors of many types
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            try:
                super().save_overload(sig, data)
            except OSError:
                raise
            except Exception:  # the index is damaged
                self.flush()
                super().save_overload(sig, data)


@functools.cache
def _folder() -> str:
    sources = sources_of_kernels(Path(__file__).parents[1])
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    return str(cache_dir() / f"kernels-{digest[:16]}")
