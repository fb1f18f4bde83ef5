"""The phases of a server's start, from the lines of its log."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

POLL_SECONDS = 0.02

ENDS = {
    "command": r"non-default args",
    "config, engine process": r"Initializing a V1 LLM engine",
    "worker process": r"Starting to load model",
    "load model": r"Loading weights took",
    "compile, warm up": r"Warming up done",
    "cost of a step": r"Lookahead: a forward pass costs",
    "proposer": r"Lookahead drafts with",
    "rest of engine": r"init engine \(profile",
    "HTTP": r"Application startup complete",
}
"""Each phase of a start, in order, and the line of vLLM's log that ends it."""
FIRST_ANSWER = "first answer"


class LogFollower:
    """Takes the time at which the first line of each phase's end appears in a log.

    A context manager: it reads the file in a thread of its own, every `POLL_SECONDS`. Times are of
    `time.monotonic`.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.ends: dict[str, float] = {}

    def __enter__(self) -> LogFollower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        position, rest, is_last = 0, b"", False
        while not is_last:
            is_last = self._stopped.wait(POLL_SECONDS)
            now = time.monotonic()
            if not self._log.exists():
                continue
            with self._log.open("rb") as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"), now)

    def _take(self, line: str, now: float) -> None:
        for phase, pattern in ENDS.items():
            if re.search(pattern, line):
                self.ends.setdefault(phase, now)


def durations(begin: float, ends: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase that has an end.

    A phase begins where the one before it ended; one without an end is part of the next one.
    """
    result = {}
    for phase in ENDS:
        if phase in ends:
            result[phase] = ends[phase] - begin
            begin = ends[phase]
    return result
