"""The time of a step, without the time in which the engine did not run."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_PAUSE_SHARE = 0.25
"""A step that overlaps with a pause is not measured if the pause is a larger share of its time."""


class StepClock:
    """Measures a step: from the same point of the step before to this one, without pauses.

    Parameters
    ----------
    overlaps
        Whether a step may be computed during a pause, because the engine schedules it before the
        step before it has ended. How long a pause delays a step is unknown then, so the time of a
        step is whole or, with a long pause, unknown.
    """

    def __init__(self, overlaps: bool) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self._overlaps = overlaps
        self._last: float | None = None
        self._pause = 0.0

    def pause(self, seconds: float) -> None:
        """The engine did not run for so long since the last step."""
        self._pause += seconds

    def tick(self) -> float | None:
        """Seconds since the last tick in which the engine ran; None if they are unknown."""
        now, last, pause = self.clock(), self._last, self._pause
        self._last, self._pause = now, 0.0
        if last is None:
            return None
        elapsed = now - last
        if not self._overlaps:
            return elapsed - pause
        return elapsed if pause <= MAX_PAUSE_SHARE * elapsed else None
