"""Waits for what another thread or process does."""

import time
from collections.abc import Callable


def wait(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether the condition holds, at the latest after this time."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds
