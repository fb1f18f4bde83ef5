"""When an engine ends: time to save what was learned, before its processes are gone.

vLLM's front-end asks an engine process to end and, unless requests may be drained, kills it in the
same moment; the engine process gives a worker 5 seconds. And a process group that is sent a signal
as a whole, by Ctrl-C for instance, ends in all places at once: the front-end's SIGTERM then meets
an engine process whose teardown has begun with taking away its signal handlers. So both wait
longer, and an engine process saves, or waits for the worker that does, before its teardown.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakMethod

TIME_TO_SAVE = 15
"""Seconds that a worker process gets to end, where vLLM would give 5."""

TIME_TO_END = TIME_TO_SAVE + 5.0
"""Seconds that an engine process gets, where vLLM would give none or 5. vLLM's SIGTERM to a worker
that takes longer comes before its end."""

_before_teardown: list[WeakMethod[Callable[[], None]]] = []


def allow_time_to_end() -> None:
    """In the front-end's process: wait for processes that were asked to end."""
    # Read by this process and those that it starts.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(TIME_TO_SAVE))
    _wrap_manager()


@functools.cache
def _wrap_manager() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.utils import CoreEngineProcManager

    CoreEngineProcManager.shutdown = _with_time_to_end(CoreEngineProcManager.shutdown)
    AsyncLLM.shutdown = _listening_no_more(AsyncLLM.shutdown)


def _listening_no_more(original: Callable[..., None]) -> Callable[..., None]:
    """`AsyncLLM.shutdown` that ends the task that waits for outputs before the engine is gone.

    vLLM ends it afterwards. In the time that the engine gets to save, the task would see that the
    engine is gone, and log that as an error.
    """
    from vllm.utils.async_utils import cancel_task_threadsafe

    @functools.wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        # Where requests may be drained, their outputs are still to come.
        if not timeout and self.output_handler is not None:
            cancel_task_threadsafe(self.output_handler)
        original(self, timeout)

    return shutdown


def _with_time_to_end(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        # Where requests may be drained, the timeout is the deadline that makes an end of it.
        if self._request_shutdown_timeout == 0:
            timeout = max(timeout or 0.0, TIME_TO_END)
        original(self, timeout)

    return shutdown


def before_teardown(action: Callable[[], None]) -> None:
    """In a process with a drafter: call `action`, a method, once the engine's loop has ended.

    The method does not keep its object alive: an engine in the user's own process has no loop.
    """
    _before_teardown.append(WeakMethod(action))
    save_before_teardown()


@functools.cache
def save_before_teardown() -> None:
    """In the engine's process: let everything be saved once the loop has ended."""
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    original = EngineCoreProc._handle_shutdown

    @functools.wraps(original)
    def handle_shutdown(self: Any) -> bool:
        _end_with_parent()
        was_asked = self.shutdown_state == EngineShutdownState.REQUESTED
        goes_on: bool = original(self)
        if goes_on:
            if was_asked:
                # Whoever drains requests may be killed before the last one ends.
                with suppress(RuntimeError, TimeoutError):
                    self.model_executor.collective_rpc(_begin_to_save, timeout=TIME_TO_SAVE)
            return True
        while _before_teardown:
            if action := _before_teardown.pop()():
                action()
        if isinstance(executor := self.model_executor, MultiprocExecutor):
            executor.shutdown()  # the workers save; a second call does nothing
            # Nor does this one, where a thread calls it already because one of them was gone.
            deadline = time.monotonic() + TIME_TO_SAVE
            for worker in executor.workers:
                worker.proc.join(max(0.0, deadline - time.monotonic()))
        return False

    EngineCoreProc._handle_shutdown = handle_shutdown


def _begin_to_save(worker: Any) -> None:
    """In a worker."""
    worker.model_runner.drafter.begin_to_save()


@functools.cache
def _end_with_parent() -> None:
    """Ask this engine process to end when the one that started it is gone: nobody else would."""
    if parent := multiprocessing.parent_process():

        def follow() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=follow, name="lookahead-parent", daemon=True).start()
