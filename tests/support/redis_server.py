"""A real Redis server on a socket of its own, which tests can stop, freeze and start again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


class RedisServer:
    """Keeps nothing on disk: a server that was killed starts empty."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._socket, self._settings = folder / "redis.sock", settings
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        assert BINARY is not None
        silent = ["--port", "0", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [BINARY, *silent, "--unixsocket", str(self._socket), *self._settings],
            stdout=subprocess.DEVNULL,
        )
        for _ in range(500):
            if self._socket.exists():
                return
            time.sleep(0.01)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        from redis import Redis

        return Redis.from_url(self.url, protocol=2)
