"""What the processes of a server take, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import requests

from tests.support.servers import Server

TIME_TO_END = 60.0
"""Seconds after which a server that was told to end counts as hanging."""

ENGINE_ERROR = re.compile(r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR", re.MULTILINE)
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")


class Watch:
    """One server's memory over time, and its log.

    Parameters
    ----------
    server : Server
        The server; the processes that it has now are those that are watched.
    log : Path
        Where it writes.
    """

    def __init__(self, server: Server, log: Path) -> None:
        self.port = int(server.url.rsplit(":", 1)[1])
        self._server = server
        self._log = log
        main = psutil.Process(server.process.pid)
        self._processes = [main, *main.children(recursive=True)]
        self.samples: list[list[int]] = []

    def sample(self) -> None:
        """Keep what is resident now, in bytes, of each process."""
        sizes = []
        for process in self._processes:
            try:
                sizes.append(process.memory_info().rss)
            except psutil.NoSuchProcess:
                sizes.append(0)
        self.samples.append(sizes)

    def memory(self) -> dict[str, tuple[int, float]]:
        """What is resident at the end, and how much that grew: all together, and by process."""
        names = ["all processes", *(f"{process.name()}" for process in self._processes)]
        series = [[sum(sizes) for sizes in self.samples], *zip(*self.samples, strict=True)]
        return {
            name: (sizes[-1], growth(sizes))
            for name, sizes in zip(names, series, strict=True)
            if sizes[-1] > 100 << 20
        }

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total

    def unfinished(self) -> int:
        """Requests that the engine holds."""
        metrics = requests.get(f"{self._server.url}/metrics", timeout=30).text
        numbers = re.findall(
            r"^vllm:num_requests_(?:running|waiting)\{\S* (\S+)$", metrics, re.MULTILINE
        )
        return int(sum(map(float, numbers)))

    def has_come_to_rest(self, patience: float = 30.0) -> bool:
        """Whether all requests end, now that their clients are gone."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not self.unfinished():
                return True
            time.sleep(0.5)
        return False

    def errors_of_the_engine(self) -> list[str]:
        """Log lines with which the processes behind the API server reported an error."""
        text = self._log.read_text(errors="replace")
        return [line[:300] for line in text.splitlines() if ENGINE_ERROR.match(line)]

    def end(self) -> dict[str, str]:
        """Tell the server to end, as a service manager does; what went wrong, by kind."""
        before = len(self._log.read_text(errors="replace"))
        wrong = {}
        self._server.process.send_signal(signal.SIGTERM)
        try:
            status = self._server.process.wait(TIME_TO_END)
            if status != 0:
                wrong["status"] = f"the server ended with {status} after SIGTERM"
        except subprocess.TimeoutExpired:
            wrong["hangs"] = f"the server did not end within {TIME_TO_END:.0f} s of SIGTERM"
        said = self._log.read_text(errors="replace")[before:]
        if found := TRACEBACK.search(said):
            start = max(0, found.start() - 200)
            wrong["traceback"] = f"the server ended with a traceback: {said[start:][:2000]}"
        _, alive = psutil.wait_procs(self._processes, timeout=10)
        alive = [p for p in alive if p.pid != self._server.process.pid]
        if alive:
            names = ", ".join(f"{process.name()} ({process.pid})" for process in alive)
            wrong["left"] = f"processes outlived the server: {names}"
        return wrong


def growth(samples: Sequence[int]) -> float:
    """How much more memory there is in the last tenth of the samples than in the first one."""
    tenth = max(1, len(samples) // 10)
    return median(samples[-tenth:]) / median(samples[:tenth]) - 1


def cpu_seconds_of_this_process() -> float:
    times = os.times()
    return times.user + times.system
