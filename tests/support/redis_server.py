"""A real Redis server on a socket of its own, which tests can stop, freeze and start again."""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


class RedisServer:
    """Listens on the socket at `path`, and keeps nothing: a killed server starts empty."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.path, self._settings = folder / "redis.sock", settings
        self.url = f"unix://{self.path}"
        self.start()

    def start(self) -> None:
        assert BINARY is not None
        silent = ["--port", "0", "--save", "", "--appendonly", "no"]
        silent += ["--dir", str(self.path.parent), "--repl-diskless-sync-delay", "0"]
        self._process = subprocess.Popen(
            [BINARY, *silent, "--unixsocket", str(self.path), *self._settings],
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.path)) == 0:
                    return
            time.sleep(0.01)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.path.unlink(missing_ok=True)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        from redis import Redis

        return Redis.from_url(self.url, protocol=2)
