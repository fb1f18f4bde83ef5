"""The time of a step, unless the engine did not run for a part of it."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_PAUSE_SHARE = 0.25
"""A step that overlaps with a pause is not measured if the pause is a larger share of its time."""


class StepClock:
    """Measures a step: from the same point of the step before to this one.

    A step may be computed during a pause, because the engine schedules it before the step before it
    has ended. So how long a pause delays a step is unknown.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self._last: float | None = None
        self._pause = 0.0

    def pause(self, seconds: float) -> None:
        """The engine did not run for so long since the last step."""
        self._pause += seconds

    def tick(self) -> float | None:
        """Seconds since the last tick; None if the engine did not run for too long."""
        now, last, pause = self.clock(), self._last, self._pause
        self._last, self._pause = now, 0.0
        if last is None:
            return None
        elapsed = now - last
        return elapsed if pause <= MAX_PAUSE_SHARE * elapsed else None
