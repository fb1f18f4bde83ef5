"""Start `vllm serve` as users do, or faster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import requests
from vllm.entrypoints.cli import main as cli

from benchmarks.cores import share_out
from benchmarks.serving.server import free_port
from tests.support import forks

START_SECONDS = 600
"""For a server to answer; on a busy machine, each process imports vLLM for a minute."""


ANSWER_SECONDS = 600
"""For an answer; only a server that hangs takes longer."""

END_SECONDS = 150
"""For a server to end, before it is killed."""


class Server(NamedTuple):
    """A healthy server; `process` leads its own process group."""

    url: str
    process: subprocess.Popen[bytes]


def cores_of(ranks: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for `ranks` processes: the cores of this process, shared out."""
    return share_out(os.sched_getaffinity(0), ranks)


@contextmanager
def running(model: Path, log: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """A healthy server; its process group is terminated after the block, which may end it itself.

    `environment` is added to that of this process.
    """
    port = free_port()
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    env |= environment
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, *flags], stdout=sink, stderr=sink, env=env, start_new_session=True
        )
    try:
        yield Server(wait_for(port, log, lambda: process.poll() is None), process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(port: int, log: Path, is_alive: Callable[[], bool]) -> str:
    """Wait until the server answers; returns its base URL."""
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert is_alive(), f"the server stopped:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"no answer:\n{log.read_text()[-3000:]}"
        with suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(f"{url}/health", timeout=2).ok:
                return url
        time.sleep(0.5)


class Forked(NamedTuple):
    """A healthy server in forks."""

    url: str
    process: forks.Fork

    def all_processes(self) -> list[psutil.Process]:
        """The server, and all that it has started: its forks have the same parent."""
        server = psutil.Process(self.process.pid)
        started = server.parent().children(recursive=True)  # type: ignore[union-attr]
        return [process for process in started if process.create_time() >= server.create_time()]


@contextmanager
def forked(model: Path, log: Path, *flags: str) -> Iterator[Forked]:
    """A server in forks (`forks.py`); it is terminated after the block, which may end it itself."""
    port = free_port()
    words = ["vllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    process = forks.FORKS.Process(target=_serve, args=(words, log))
    process.start()
    try:
        yield Forked(wait_for(port, log, process.is_alive), process)
    finally:
        process.terminate()
        process.join(END_SECONDS)
        process.kill()


def _serve(words: list[str], log: Path) -> None:
    """In a fork: what vLLM's command does."""
    with log.open("a") as sink:  # its engines append to it, too
        for stream in (sys.stdout, sys.stderr):
            os.dup2(sink.fileno(), stream.fileno())
    sys.argv = words
    cli.main()
