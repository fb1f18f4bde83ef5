"""Run `vllm serve` in a process group of its own, for the duration of a `with` block."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.engines.fresh_engine import cpu_runtime, end

STARTUP_SECONDS = 600
# The engine's last message. The server may outlive it while it waits for a worker that hangs.
ENGINE_DIED = "EngineCore failed to start"


class ServerError(RuntimeError):
    """The server did not start; the message shows the end of its log."""


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Print the command, run the server, and yield its URL once it is healthy.

    The command is `vllm serve ...`, with this `--port`, and works in a shell as it is printed.
    `vllm` is that of this Python's environment; on a CPU it runs with the libraries that vLLM asks
    to have preloaded. `environment` is added to this process's. ServerError if the server ended,
    its engine died, or it was not ready after ten minutes.
    """
    say(f"\n$ {shlex.join(command)}")
    url = f"http://127.0.0.1:{port}"
    quiet = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "vllm"), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**quiet, **os.environ, **cpu_runtime(os.environ), **(environment or {})},
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, url, log)
        yield url
    finally:
        _stop(process)


def get(url: str) -> str:
    """The body of the answer to a GET request."""
    with urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())


def sum_of(metrics: str, name: str) -> float:
    """The sum of a metric over its labels, in an answer of /metrics; `name` is a pattern."""
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", metrics, re.MULTILINE)))


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    started = time.monotonic()
    reported = 0
    while (elapsed := int(time.monotonic() - started)) < STARTUP_SECONDS:
        if process.poll() is not None or ENGINE_DIED in log.read_text(errors="replace"):
            raise ServerError(f"the server did not start; {_end_of(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            get(f"{url}/health")
            say(f"\r  ready after {elapsed} s{' ' * 40}" if sys.stdout.isatty() else "  ready")
            return
        if sys.stdout.isatty():
            say(f"\r  starting, {elapsed} s (usually 20 to 80; log: {_shown(log)})", end="")
        elif elapsed >= reported + 15:
            reported = elapsed
            say(f"  starting, {elapsed} s")
        time.sleep(0.5)
    raise ServerError(f"the server was not ready after {STARTUP_SECONDS} s; {_end_of(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children, such as the engine; after ten seconds, kill them."""
    handlers = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    end(process)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-30:]
    return "\n".join([f"its log, {_shown(log)}, ends with:", "", *lines])


def _shown(path: Path) -> str:
    """The path, relative to the working directory if it is inside."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def say(text: str = "", end: str = "\n") -> None:
    print(text, end=end, flush=True)
