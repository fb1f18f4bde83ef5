"""Threads that help a kernel with its tasks, without Python and without its lock (the GIL).

A kernel divides its work into numbered tasks and calls `offer_tasks`. The calling thread and the
helpers take tasks until none is left. A helper that wakes late costs nothing: the other threads
have done its share by then. `wait_for_tasks` returns when every task is finished.

Each helper calls one kernel that returns only at the end, and waits in it on a semaphore of the C
library. So helpers need no GIL to begin or to end a task, and share no thread with OpenMP. A
forked process has no helpers; its kernels do all tasks themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from lookahead_vllm.draft.jit import Int64s, kernel

# Places in `HelperThreads.shared`, a cache line each: two counters, two semaphores and a flag.
_LINE = 8
_NOT_TAKEN, _NOT_FINISHED, _OFFERED, _FINISHED, _STOPPED = range(0, 5 * _LINE, _LINE)

# They take the address of a semaphore, which has at most 32 bytes.
_sem_init = types.ExternalFunction("sem_init", types.intc(types.intp, types.intc, types.uintc))
_sem_post = types.ExternalFunction("sem_post", types.intc(types.intp))
_sem_wait = types.ExternalFunction("sem_wait", types.intc(types.intp))


def _atomic(operation: str) -> Any:
    """An atomic operation of LLVM on one place of an int64 array; returns the value before."""

    @intrinsic
    def apply(context: Any, array: Any, place: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array_type = signature.args[0]
            memory = context.make_array(array_type)(context, builder, arguments[0])
            pointer = cgutils.get_item_pointer(context, builder, array_type, memory, [arguments[1]])
            return builder.atomic_rmw(operation, pointer, arguments[2], "seq_cst")

        return types.int64(array, types.intp, types.int64), generate

    return apply


_exchange, _subtract = _atomic("xchg"), _atomic("sub")


@kernel
def _address(shared: Int64s, place: int) -> np.int64:
    return np.int64(shared.ctypes.data) + 8 * place


@kernel
def _wait(shared: Int64s, semaphore: int) -> None:
    while _sem_wait(_address(shared, semaphore)) != 0:
        pass  # a signal interrupted it


@kernel
def offer_tasks(shared: Int64s, num_tasks: int, num_helpers: int) -> None:
    """Offer the tasks 0, ..., num_tasks - 1, at least one, and wake `num_helpers` helpers.

    What the tasks read must have been written before.
    """
    shared[_NOT_FINISHED] = num_tasks
    _exchange(shared, _NOT_TAKEN, num_tasks)  # from here on, threads take tasks
    for _ in range(num_helpers):
        _sem_post(_address(shared, _OFFERED))


@kernel
def take_task(shared: Int64s) -> int:
    """The number of a task that no other thread has taken; below 0 if all are taken."""
    return _subtract(shared, _NOT_TAKEN, 1) - 1


@kernel
def finish_task(shared: Int64s) -> None:
    """The thread has done a task that it took."""
    if _subtract(shared, _NOT_FINISHED, 1) == 1:
        _sem_post(_address(shared, _FINISHED))


@kernel
def wait_for_tasks(shared: Int64s) -> None:
    """In the thread that offered tasks: wait until all of them are finished."""
    _wait(shared, _FINISHED)


@kernel
def wait_for_offer(shared: Int64s) -> bool:
    """In a helper: wait for an offer. False if the helper must end."""
    _wait(shared, _OFFERED)
    return shared[_STOPPED] == 0


@kernel
def _make_semaphores(shared: Int64s) -> bool:
    made = _sem_init(_address(shared, _OFFERED), 0, 0) == 0
    return made and _sem_init(_address(shared, _FINISHED), 0, 0) == 0


@kernel
def _stop(shared: Int64s, count: int) -> None:
    shared[_STOPPED] = 1
    for _ in range(count):
        _sem_post(_address(shared, _OFFERED))


class HelperThreads:
    """Threads that help with offered tasks until this object is deleted.

    Parameters
    ----------
    count : int
        The number of threads.
    run : callable
        A kernel with `nogil=True` that takes and finishes tasks whenever `wait_for_offer` returns
        true, and returns when that returns false. It must not raise: every task that is taken is
        waited for.
    *arguments
        Of `run`, followed by `shared`.

    Attributes
    ----------
    shared : int64 [40]
        What the functions of this module take.

    Raises
    ------
    OSError
        The system has no semaphores of this kind.
    RuntimeError
        The system starts no further thread.
    """

    def __init__(self, count: int, run: Callable[..., None], *arguments: Any) -> None:
        self.count = count
        self.shared: Int64s = np.zeros(5 * _LINE, np.int64)
        if not _make_semaphores(self.shared):
            raise OSError("this system has no semaphores for threads; write draft_threads=1")
        _stop(self.shared, 1)
        run(*arguments, self.shared)  # compiles it; returns at once
        self.shared[_STOPPED] = 0
        self._end = weakref.finalize(self, _stop, self.shared, count)
        # At the end of the process they keep waiting: Python is no longer there to return to.
        self._end.atexit = False
        self.threads = [
            Thread(target=run, args=(*arguments, self.shared), name=f"draft-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; no task may be left."""
        self._end()
