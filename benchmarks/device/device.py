"""A device that takes time and computes nothing, with CUDA's streams and events.

It needs no thread: a stream is the instant at which its work ends. Work that the host launches
starts when the work before it on the same stream has ended, or at once if the device is idle. An
event is the instant that its stream has reached when the event is recorded, and the host waits for
it by sleeping. So the device keeps no core busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class HostClock:
    """The CPU time of the thread that made it, plus the time that this thread slept here.

    What stands in for kernels takes none (`stopped`). Other programs do not count, nor does the
    time in which the thread is blocked elsewhere. It sleeps for as long as on a real device, so
    that caches cool down as they would there.
    """

    def __init__(self) -> None:
        self._thread = get_ident()
        self._slept = 0.0
        self._stopped_at: float | None = None
        self._sleep: Callable[[float], None] = time.sleep

    def now(self) -> float:
        """The current instant, in seconds; RuntimeError on another thread."""
        if get_ident() != self._thread:
            raise RuntimeError("the clock follows one thread, but another one uses the device")
        if self._stopped_at is not None:
            return self._stopped_at
        return time.thread_time() + self._slept

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What the thread does in the block takes no time by this clock."""
        self._stopped_at = self.now()
        begin = time.thread_time()
        try:
            yield
        finally:
            self._slept -= time.thread_time() - begin
            self._stopped_at = None

    def sleep_until(self, instant: float) -> None:
        """Return at `instant`, and not before. Waking up takes no time."""
        rest = instant - self.now()
        if rest > 0:
            self._sleep(rest)
            self._slept += max(0.0, instant - self.now())

    def install(self) -> None:
        """Let this thread measure times (`time.perf_counter`) and sleep by this clock."""
        machine = time.perf_counter

        def sleep_here(seconds: Any) -> None:
            if get_ident() == self._thread and seconds > 0:
                self.sleep_until(self.now() + seconds)
            else:
                self._sleep(seconds)

        time.perf_counter = lambda: self.now() if get_ident() == self._thread else machine()
        time.sleep = sleep_here


class Launch(NamedTuple):
    """A piece of work on the device; instants in seconds."""

    start: float
    end: float
    wait: float
    """The time that the device was idle before it, because the host had launched nothing."""
    tokens: int


class Copy(NamedTuple):
    """A copy to the host that the device has not reached yet."""

    instant: float
    values: NDArray[Any]
    target: NDArray[Any]


class SimulatedDevice:
    """A device with streams; copies to the host arrive when it has reached them.

    Its times are in seconds of the host's clock, and it spends its own in `launch` alone. Events,
    copies and waits of streams take none.
    """

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self.launches: list[Launch] = []
        """In the order in which they were launched."""
        self.current = self.main = Stream(self)
        """The stream of `launch` and `copy_to_host`."""
        self._idle_since: float | None = None
        self._copies: list[Copy] = []
        self._lock = Lock()

    def launch(self, seconds: float, tokens: int = 0) -> None:
        """Queue work on the current stream; returns at once."""
        now = self.clock.now()
        start = max(now, self.current.ends_at)
        self.current.ends_at = end = start + seconds
        wait = 0.0 if self._idle_since is None else max(0.0, start - self._idle_since)
        self._idle_since = end if self._idle_since is None else max(self._idle_since, end)
        self.launches.append(Launch(start, end, wait, tokens))

    def copy_to_host(self, values: NDArray[Any]) -> NDArray[Any]:
        """Queue a copy on the current stream; returns the host's array.

        Until the host has waited for the copy, the array holds `unwritten` values: a host that
        reads too early gets nonsense.
        """
        target = np.full_like(values, unwritten(values.dtype))
        with self._lock:
            self._copies.append(Copy(self.current.reached(), values.copy(), target))
        return target

    def wait_until(self, instant: float) -> None:
        """Let the host wait until the device has reached `instant`."""
        if self.clock.now() < instant:
            self.clock.sleep_until(instant)
        self._deliver()

    def has_reached(self, instant: float) -> bool:
        """Whether the device has reached `instant`."""
        reached = self.clock.now() >= instant
        if reached:
            self._deliver()
        return reached

    def synchronize(self, *_: Any) -> None:
        """Let the host wait until the device is idle."""
        self.wait_until(self._idle_since or 0.0)

    def _deliver(self) -> None:
        """Write the copies that the device has reached."""
        if not self._copies:
            return
        now = self.clock.now()
        with self._lock:
            later = []
            for copy in self._copies:
                if copy.instant <= now:
                    copy.target[...] = copy.values
                else:
                    later.append(copy)
            self._copies = later


def unwritten(dtype: np.dtype[Any]) -> Any:
    """What a host array holds before the copy from the device has arrived."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).max
    return np.nan if dtype.kind == "f" else True


class Stream:
    """The stand-in for `torch.cuda.Stream`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._before: list[Stream] = []
        self.ends_at = 0.0
        """The instant at which the work that was queued so far ends."""

    def reached(self) -> float:
        """The instant at which the device reaches what is queued next."""
        return max(self.ends_at, self._device.clock.now())

    def wait_stream(self, other: Stream) -> None:
        """Let the work queued later start after what is queued on `other` now."""
        self.ends_at = max(self.ends_at, other.ends_at)

    def wait_event(self, event: Event) -> None:
        """Let the work queued later start after the event."""
        self.ends_at = max(self.ends_at, event.instant)

    def query(self) -> bool:
        """Whether the work queued so far has ended."""
        return self._device.has_reached(self.ends_at)

    def synchronize(self) -> None:
        """Let the host wait for the work queued so far."""
        self._device.wait_until(self.ends_at)

    def __enter__(self) -> Stream:
        self._before.append(self._device.current)
        self._device.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before.pop()


class Event:
    """The stand-in for `torch.cuda.Event`; one that was never recorded has been reached."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.instant = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Take the place after the work queued so far on `stream`, or on the current one."""
        self.instant = (self._device.current if stream is None else stream).reached()

    def wait(self, stream: Stream | None = None) -> None:
        """Let the work queued later on `stream`, or on the current one, start after the event."""
        (self._device.current if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Whether the device has reached it."""
        return self._device.has_reached(self.instant)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self._device.wait_until(self.instant)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return 1e3 * (end.instant - self.instant)
