"""The time in which the engine does not run: between two steps of its loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.core import EngineCore

from lookahead_vllm.engine import messages, patches

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Pauses:
    """The attribute `pauses` of a scheduler: tells the workers what is not part of a step's time.

    A pause lasts from the end of a step of the engine's loop to the beginning of the next one. The
    engine waits there for requests, is paused or asleep, runs what a client asked for, or waits for
    its caller. A step that has nothing to compute is part of the pause.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self._begin = self.clock()
        self._seconds = 0.0
        self._ran = False
        end_pauses_with_steps()

    def end(self) -> None:
        """A step begins: it will be scheduled."""
        now = self.clock()
        if not self._ran:  # else the caller does not tell when a step ends
            self._seconds += now - self._begin
        self._begin = now

    def send(self, output: SchedulerOutput) -> None:
        """A step was scheduled: send the pause before it, if it has anything to compute."""
        if output.total_num_scheduled_tokens:
            self._ran = True
            messages.attach_pause(output, self._seconds)
            self._seconds = 0.0

    def receive(self, output: SchedulerOutput) -> None:
        """The outcome of a step has arrived."""
        self._ran |= output.total_num_scheduled_tokens > 0

    def begin(self) -> None:
        """A step of the engine's loop has ended."""
        if self._ran:
            self._begin, self._ran = self.clock(), False


@functools.cache
def end_pauses_with_steps() -> None:
    """Note the end of every step; leave out vLLM's call to the worker after it: our drafts come
    with the step's output."""
    patches.patch(EngineCore, "post_step", _with_pauses)


def _with_pauses(original: Callable[..., None]) -> Callable[..., None]:
    """`EngineCore.post_step`, which does only this if the scheduler is ours."""

    @functools.wraps(original)
    def post_step(self: EngineCore, *args: Any, **kwargs: Any) -> None:
        pauses: Pauses | None = getattr(self.scheduler, "pauses", None)
        if pauses is None:
            original(self, *args, **kwargs)
        else:
            pauses.begin()

    return post_step
