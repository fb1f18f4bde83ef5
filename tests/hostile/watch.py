"""Memory, CPU time, log and shutdown of a server's processes."""

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

from tests.support.servers import END_SECONDS, Server

ENGINE_ERROR = re.compile(r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR", re.MULTILINE)
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")


class Watch:
    """Observes the processes and the log of one server.

    Parameters
    ----------
    server : Server
        Its present processes are observed.
    log : Path
        Its output.
    """

    def __init__(self, server: Server, log: Path) -> None:
        self.port = int(server.url.rsplit(":", 1)[1])
        self._server = server
        self._log = log
        main = psutil.Process(server.process.pid)
        self._processes = [main, *main.children(recursive=True)]
        self.samples: list[list[int]] = []

    def sample(self) -> None:
        """Record the resident memory of each process, in bytes."""
        sizes = []
        for process in self._processes:
            try:
                sizes.append(process.memory_info().rss)
            except psutil.NoSuchProcess:
                sizes.append(0)
        self.samples.append(sizes)

    def memory(self) -> dict[str, tuple[int, float]]:
        """Resident bytes at the end, and growth: in total, and by process above 100 MiB."""
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
        """Number of running and waiting requests."""
        metrics = requests.get(f"{self._server.url}/metrics", timeout=30).text
        numbers = re.findall(
            r"^vllm:num_requests_(?:running|waiting)\{\S* (\S+)$", metrics, re.MULTILINE
        )
        return int(sum(map(float, numbers)))

    def becomes_idle(self, timeout: float = 30.0) -> bool:
        """Whether all requests end within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.unfinished():
                return True
            time.sleep(0.5)
        return False

    def errors_of_the_engine(self) -> list[str]:
        """Error lines of the engine core and the workers in the log."""
        text = self._log.read_text(errors="replace")
        return [line[:300] for line in text.splitlines() if ENGINE_ERROR.match(line)]

    def end(self) -> dict[str, str]:
        """Send SIGTERM, as a service manager does; return what goes wrong, by kind."""
        log_length = len(self._log.read_text(errors="replace"))
        faults = {}
        self._server.process.send_signal(signal.SIGTERM)
        try:
            status = self._server.process.wait(END_SECONDS)
            if status != 0:
                faults["status"] = f"the server ended with {status} after SIGTERM"
        except subprocess.TimeoutExpired:
            faults["hangs"] = f"the server did not end within {END_SECONDS} s of SIGTERM"
        text = self._log.read_text(errors="replace")[log_length:]
        if found := TRACEBACK.search(text):
            start = max(0, found.start() - 200)
            faults["traceback"] = f"the server ended with a traceback: {text[start:][:2000]}"
        _, alive = psutil.wait_procs(self._processes, timeout=END_SECONDS)
        alive = [p for p in alive if p.pid != self._server.process.pid]
        if alive:
            names = ", ".join(f"{process.name()} ({process.pid})" for process in alive)
            faults["left"] = f"processes outlived the server: {names}"
        return faults


def growth(samples: Sequence[int]) -> float:
    """Relative growth from the median of the first tenth of the samples to that of the last."""
    tenth = max(1, len(samples) // 10)
    return median(samples[-tenth:]) / median(samples[:tenth]) - 1


def cpu_seconds_of_this_process() -> float:
    times = os.times()
    return times.user + times.system
