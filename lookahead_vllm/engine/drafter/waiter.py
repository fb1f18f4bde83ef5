"""Waits for the tokens of a step."""

import time
from collections import deque
from collections.abc import Callable

from lookahead_vllm.draft.instructions import pause_unlocked
from lookahead_vllm.engine.step.step import Step

SLEEP_SHARE = 0.8
"""The drafting rank works or sleeps for so much of the shortest of the last steps before it
polls."""
POLL_SECONDS = 0.01
"""After this time of polling, it waits as vLLM does."""


class Waiter:
    """Waits for the tokens of steps.

    vLLM's event puts the thread to sleep until the driver wakes it, 20 to 60 µs late, while the
    device has nothing to do. So work or sleep until shortly before they should come, and poll then.

    Parameters
    ----------
    work
        Works for at most so many seconds, if there is something to do.
    """

    def __init__(self, work: Callable[[float], None]) -> None:
        self._work = work
        self._durations: deque[float] = deque(maxlen=8)
        """Seconds from the launch of the last steps to their tokens."""

    def wait(self, step: Step, stand_by: Callable[[], None] = lambda: None) -> None:
        """Wait for the tokens of a step; calls `stand_by` before it polls."""
        if step.has_ended:
            return
        shortest = min(self._durations, default=0.0)
        end = step.launched + SLEEP_SHARE * shortest
        if (left := end - time.perf_counter()) > 0:
            self._work(left)
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        stand_by()
        give_up = time.perf_counter() + POLL_SECONDS
        while not step.has_ended:
            if time.perf_counter() > give_up:
                step.wait()
                break
            pause_unlocked()
        self._durations.append(time.perf_counter() - step.launched)
