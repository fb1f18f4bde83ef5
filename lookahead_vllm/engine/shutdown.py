"""The end of an engine: its processes get enough time to save the cache file.

vLLM's front-end asks an engine process to end and, unless requests may be drained, kills it at
once; the engine process gives a worker 5 seconds. A signal to the whole process group, as by
Ctrl-C, ends all of them together: the front-end's SIGTERM then kills an engine process whose
teardown has already removed its signal handlers. So both wait longer, and an engine process saves,
or waits for the worker that does, before its teardown. Ray's executors kill their workers without a
signal, so an engine process first calls the workers to save. It also replaces Ray's handler of
SIGTERM, which would abort it 3 seconds later. An idle engine process may miss a signal altogether:
see `_wake_on_signals`.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Queue
from typing import Any
from weakref import WeakMethod, WeakSet

from lookahead_vllm.engine import config, patches

logger = logging.getLogger(f"vllm.{__name__}")

_WORKER_TIMEOUT = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
_DEFAULT_SECONDS = 15

_before_teardown: list[WeakMethod[Callable[[], None]]] = []
_saved_on_ray: WeakSet[Any] = WeakSet()
"""Executors whose workers were called to save."""


def seconds_to_save() -> int:
    """For a worker process to end; vLLM's default is 5, lookahead's 15, and users may set it."""
    return int(os.environ.get(_WORKER_TIMEOUT, _DEFAULT_SECONDS))


def seconds_to_end() -> int:
    """For an engine process to end; vLLM's default is 0 or 5.

    A worker that takes longer to save gets vLLM's SIGTERM before this time is over.
    """
    return seconds_to_save() + 5


def allow_time_to_end() -> None:
    """In the front-end's process: wait longer for the processes that it asks to end."""
    os.environ.setdefault(_WORKER_TIMEOUT, str(_DEFAULT_SECONDS))  # child processes inherit it
    _patch_front_end()


@functools.cache
def _patch_front_end() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.utils import CoreEngineProcManager

    patches.patch(CoreEngineProcManager, "shutdown", _with_time_to_end)
    patches.patch(AsyncLLM, "shutdown", _cancelling_output_handler)


def _cancelling_output_handler(original: Callable[..., None]) -> Callable[..., None]:
    """`AsyncLLM.shutdown`, which first ends the task that waits for outputs.

    vLLM ends it last. While the front-end waits for the engine, the task would notice the engine's
    end and log it as an error.
    """
    from vllm.utils.async_utils import cancel_task_threadsafe

    @functools.wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        # `__del__` ends a client whose `__init__` failed before it set the field.
        handler = getattr(self, "output_handler", None)
        # With a timeout, requests are drained, and their outputs are still to come.
        if not timeout and handler is not None:
            cancel_task_threadsafe(handler)
        original(self, timeout)

    return shutdown


def _with_time_to_end(original: Callable[..., None]) -> Callable[..., None]:
    """`CoreEngineProcManager.shutdown`, which waits for `seconds_to_end` at least."""

    @functools.wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        # A nonzero value allows vLLM to drain requests; then the timeout is a deadline.
        if self._request_shutdown_timeout == 0:
            timeout = max(timeout or 0.0, seconds_to_end())
        original(self, timeout)

    return shutdown


def before_teardown(action: Callable[[], None]) -> None:
    """In a process with a drafter: call `action`, a method, when the engine's loop has ended.

    Its object is not kept alive, because an engine in the user's own process has no loop.
    """
    _before_teardown.append(WeakMethod(action))
    save_before_teardown()


@functools.cache
def save_before_teardown() -> None:
    """In the engine's process: save when its loop has ended, and before Ray kills its workers."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    patches.patch(EngineCoreProc, "_handle_shutdown", _saving)
    patches.patch(EngineCore, "shutdown", _saving_on_ray)


def _saving(original: Callable[..., bool]) -> Callable[..., bool]:
    """`EngineCoreProc._handle_shutdown`, which saves before it returns False, the loop's end."""
    from vllm.v1.engine.core import EngineShutdownState
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    @functools.wraps(original)
    def handle_shutdown(self: Any) -> bool:
        _end_with_parent()
        _wake_on_signals(self.input_queue)
        if self.model_executor.uses_ray:
            _replace_handler_of_ray()
        was_requested = self.shutdown_state == EngineShutdownState.REQUESTED
        if original(self):
            if was_requested:
                # The process may be killed before the last request is drained.
                with suppress(Exception):  # a worker has ended; Ray has errors of its own
                    self.model_executor.collective_rpc(_begin_to_save, timeout=seconds_to_save())
            return True
        while _before_teardown:
            if action := _before_teardown.pop()():
                action()
        _save_on_ray(executor := self.model_executor)
        if isinstance(executor, MultiprocExecutor) and not executor.uses_ray:
            executor.shutdown()  # the workers save; a second call does nothing
            # If another thread called it first, because a worker had ended, the call returns early.
            deadline = time.monotonic() + seconds_to_save()
            for worker in executor.workers:
                worker.proc.join(max(0.0, deadline - time.monotonic()))
        return False

    return handle_shutdown


def _saving_on_ray(original: Callable[..., None]) -> Callable[..., None]:
    """`EngineCore.shutdown`, which saves in the workers of a Ray executor first."""

    @functools.wraps(original)
    def shutdown(self: Any) -> None:
        _save_on_ray(self.model_executor)
        original(self)

    return shutdown


def _save_on_ray(executor: Any) -> None:
    """Save in the workers of a Ray executor, once; does nothing with other executors."""
    if executor is None or not executor.uses_ray or executor in _saved_on_ray:
        return
    if not config.is_lookahead(executor.vllm_config):
        return
    _saved_on_ray.add(executor)
    try:
        executor.collective_rpc(_save, timeout=seconds_to_save())
    except Exception as error:  # of vLLM, or one of Ray's own
        logger.warning(
            "Lookahead's cache was not saved at the end, because a worker gave no answer: %s.",
            str(error).rstrip("."),
        )


def _begin_to_save(worker: Any) -> None:
    """Runs in a worker: start to save."""
    worker.model_runner.drafter.begin_to_save()


def _save(worker: Any) -> None:
    """Runs in a worker: save, and wait until it is done."""
    worker.model_runner.drafter.shutdown()


@functools.cache
def _replace_handler_of_ray() -> None:
    """Install the Python handler of SIGTERM again.

    Ray installs a handler in C++ over it, which sets an alarm that aborts the process after 3
    seconds, and then calls the Python handler.
    """
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@functools.cache
def _wake_on_signals(input_queue: Queue[Any]) -> None:
    """Wake the engine's loop after each signal, so that Python runs the signal's handler.

    A signal interrupts the main thread's wait for requests. One that arrives after the thread has
    released the GIL and before it sleeps does not, and the handler would wait for a request.
    """
    from vllm.v1.engine import EngineCoreRequestType

    if (earlier := signal.set_wakeup_fd(-1)) != -1:
        signal.set_wakeup_fd(earlier)  # another library wakes the thread
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wake() -> None:
        while os.read(read_end, 1):
            input_queue.put((EngineCoreRequestType.WAKEUP, None))

    threading.Thread(target=wake, name="lookahead-signals", daemon=True).start()


@functools.cache
def _end_with_parent() -> None:
    """Send this engine process a SIGTERM when the process that started it has ended."""
    if parent := multiprocessing.parent_process():

        def end_after_parent() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=end_after_parent, name="lookahead-parent", daemon=True).start()
