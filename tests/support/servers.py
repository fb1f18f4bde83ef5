"""Start `vllm serve` as a subprocess."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import requests

from benchmarks.cores import share_out

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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cores_of(ranks: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for `ranks` processes: the cores of this process, shared out."""
    return share_out(os.sched_getaffinity(0), ranks)


@contextmanager
def serve(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """The base URL of a healthy server; its process group is terminated after the block."""
    with running(model, log, *flags) as server:
        yield server.url


@contextmanager
def running(model: Path, log: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """As `serve`, with `environment` added; the block itself may end the server."""
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
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, f"the server stopped:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"no answer:\n{log.read_text()[-3000:]}"
            try:
                if requests.get(f"{url}/health", timeout=2).ok:
                    break
            except (requests.ConnectionError, requests.Timeout):
                time.sleep(0.5)
        yield Server(url, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
