"""Memory, metrics, log and shutdown of a server's processes."""

import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import requests

from benchmarks.serving.server import sum_of
from tests.support.servers import END_SECONDS, Server

ENGINE_ERROR = re.compile(r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR", re.MULTILINE)
TRACEBACK = re.compile(
    r"^(?!.*\[async_llm\.py:\d+\]).*Traceback \(most recent call last\)", re.MULTILINE
)
"""Of a fault. vLLM's front end may log an EngineDeadError while it ends the engine itself."""


class Watch:
    """Observes the present processes and the log of one server."""

    def __init__(self, server: Server, log: Path) -> None:
        self.port = int(server.url.rsplit(":", 1)[1])
        self._server = server
        self._log = log
        main = psutil.Process(server.process.pid)
        self._processes = [main, *main.children(recursive=True)]
        self.sizes: list[int] = []
        """Resident memory of all processes at each sample, in bytes."""

    def sample(self) -> None:
        """Record the resident memory."""
        size = 0
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                size += process.memory_info().rss
        self.sizes.append(size)

    def growth(self) -> float:
        """Relative growth from the median of the first tenth of the samples to the last tenth's."""
        tenth = max(1, len(self.sizes) // 10)
        return median(self.sizes[-tenth:]) / median(self.sizes[:tenth]) - 1

    def counted(self, name: str) -> float:
        """The sum of a metric."""
        return sum_of(requests.get(f"{self._server.url}/metrics", timeout=30).text, name)

    def becomes_idle(self, timeout: float = 30.0) -> bool:
        """Whether all requests end within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.counted("vllm:num_requests_(?:running|waiting)"):
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
