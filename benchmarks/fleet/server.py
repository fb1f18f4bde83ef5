"""A server for streams, and the traffic of other engines."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lookahead_vllm.draft.fleet.exchange import BY, INTERVAL_SECONDS, NEWS, STREAMS, TEXTS
from lookahead_vllm.draft.fleet.pieces import Pieces, messages_of
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.draft.trie.suffix import NUM_HASHES
from lookahead_vllm.engine.worker.fleet import connect


@contextmanager
def redis_server() -> Iterator[str]:
    """A Redis server on a socket of its own; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--save", "", "--unixsocket", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not path.exists() and process.poll() is None:
                time.sleep(0.01)
            yield f"unix://{path}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def other_engines(url: str, count: int, batch_size: int, tokens_per_second: int) -> Iterator[None]:
    """In the block, `count` engines seem to publish: `batch_size` requests of random tokens each.

    They belong to the fleet of the first engine that publishes something.
    """
    stop = threading.Event()

    def publish() -> None:
        client: Any = connect(url)
        rng = np.random.default_rng(0)
        size = max(1, round(tokens_per_second * INTERVAL_SECONDS))
        sizes = np.full(batch_size, size)
        prefix = b""
        while not stop.wait(INTERVAL_SECONDS / count):
            if not prefix:
                key = next(client.scan_iter(f"*:{NEWS}"), b"")
                prefix = key.removesuffix(NEWS.encode())
                continue
            hashes = rng.integers(0, 1 << 63, (batch_size, NUM_HASHES), np.uint64)
            tokens = rng.integers(0, 256, batch_size * size, np.int32)
            digest = digest_of("").encode()
            for message in messages_of(Pieces(hashes, sizes, tokens)):
                client.xadd(prefix + digest, {BY: b"another", TEXTS: message}, maxlen=1000)
            client.xadd(prefix + NEWS.encode(), {BY: b"another", STREAMS: digest}, maxlen=1000)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
