"""When an engine process ends: time to save what was learned, before it does.

vLLM's front-end asks an engine process to end and, unless requests may be drained, kills it in the
same moment. And a process group that is sent a signal as a whole, by Ctrl-C for instance, ends in
two places at once: the front-end's SIGTERM then meets an engine whose teardown has begun with
taking away its signal handlers. So the front-end waits, and the engine saves before its teardown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

TIME_TO_END = 15.0  # seconds that an engine process gets, where vLLM would give none or 5

_before_teardown: list[WeakMethod[Callable[[], None]]] = []


@functools.cache
def allow_time_to_end() -> None:
    """In the front-end's process: wait for engine processes that were asked to end."""
    from vllm.v1.engine.utils import CoreEngineProcManager

    CoreEngineProcManager.shutdown = _with_time_to_end(CoreEngineProcManager.shutdown)


def _with_time_to_end(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        # Where requests may be drained, the timeout is the deadline that makes an end of it.
        if self._request_shutdown_timeout == 0:
            timeout = max(timeout or 0.0, TIME_TO_END)
        original(self, timeout)

    return shutdown


def before_teardown(action: Callable[[], None]) -> None:
    """In the engine's process: call `action`, a method, once the loop has ended, if there is one.

    The method does not keep its object alive: an engine in the user's own process has no loop.
    """
    _before_teardown.append(WeakMethod(action))
    _wrap_handle_shutdown()


@functools.cache
def _wrap_handle_shutdown() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc._handle_shutdown

    @functools.wraps(original)
    def handle_shutdown(self: Any) -> bool:
        goes_on: bool = original(self)
        if not goes_on:
            while _before_teardown:
                if action := _before_teardown.pop()():
                    action()
        return goes_on

    EngineCoreProc._handle_shutdown = handle_shutdown
