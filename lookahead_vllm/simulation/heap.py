"""The memory that a native library holds, measured by the C library's allocator."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable

_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd",
    "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def bytes_in_use() -> int | None:
    """The bytes allocated with malloc now, headers included.

    None without glibc 2.33 or later, or with another allocator preloaded.
    """
    try:
        library = ctypes.CDLL(None)
        mallinfo2, malloc, free = library.mallinfo2, library.malloc, library.free
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallInfo2
    malloc.restype, malloc.argtypes, free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )

    def count() -> int:
        info = mallinfo2()
        return int(info.uordblks + info.hblkhd)

    before = count()
    probe = malloc(1 << 20)
    counted = count() - before >= 1 << 20
    free(probe)
    return before if counted else None


def bytes_released_by(release: Callable[[], None]) -> int | None:
    """The bytes of malloc that `release` frees. It runs in a fork, so nothing changes here.

    None if `bytes_in_use` is None.
    """
    if not hasattr(os, "fork") or bytes_in_use() is None:
        return None
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's idle threads hold no locks
        child = os.fork()
    if child == 0:
        try:
            before = bytes_in_use() or 0
            release()
            os.write(writing, str(before - (bytes_in_use() or 0)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int(answer) if answer else None
