"""Measure how much clients with the largest allowed references slow down another client."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.serving.server import ServerError, free_port, serving
from lookahead_vllm.cli.arguments import positive

EPILOG = """\
examples:
  scripts/cpu_env.sh .venv/bin/python scripts/bench_references.py \\
      --model .cache/models/SmolLM2-135M-Instruct

how it measures:
  One server with lookahead. --clients clients each request completions of --max-tokens tokens, one
  after the other; a plain client beside them streams answers of 128 tokens, one after the other.
  In alternating phases of --seconds the clients send no reference, and a reference of the largest
  size that the server allows, drawn from 256 prepared ones. The time per output token is the time
  between two chunks of the plain client's stream over the tokens of the later one; the times of all
  phases of a kind are pooled.
  With --default-total the server keeps its default limit for all live references together, so
  that most requests with one are refused (HTTP 400); a client then waits for a second. Otherwise
  the limit is raised until all of them fit.
"""

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "be",
    "at",
]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a folder with a model and its tokenizer")
    add("--clients", type=positive, default=32, help="default: 32")
    add("--max-tokens", type=positive, default=16, help="of each client's answers (default: 16)")
    add("--seconds", type=positive, default=20, help="of a phase (default: 20)")
    add("--phases", type=positive, default=3, help="number of each kind (default: 3)")
    add("--reference-tokens", type=positive, default=16_384, help="default: 16384, the server's")
    add("--default-total", action="store_true", help="see below")
    return parser.parse_args(argv)


def text_of(num_bytes: int, rng: random.Random) -> str:
    """Random English words, `num_bytes` long."""
    words = rng.choices(WORDS, k=num_bytes // 3)
    return " ".join(words)[:num_bytes]


class Clients:
    """All clients of one server."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._url = url
        self._options = options
        self._rng = random.Random(0)
        # Made before the run: this process shares its cores with the server.
        size = 4 * options.reference_tokens
        self._references = [text_of(size, self._rng) for _ in range(256)]
        self.with_references = False
        self.answered = {200: 0, 400: 0}

    async def send_requests(self, session: aiohttp.ClientSession) -> None:
        """One of the clients beside the plain one: a request after the other, until cancelled."""
        while True:
            body = {
                "model": "m",
                "prompt": text_of(200, self._rng),
                "max_tokens": self._options.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
            if self.with_references:
                reference = self._rng.choice(self._references)
                body["vllm_xargs"] = {"lookahead_reference": reference}
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                await response.read()
            self.answered[response.status] += 1
            if response.status != 200:
                await asyncio.sleep(1)

    async def stream(self, session: aiohttp.ClientSession, until: float) -> list[float]:
        """The plain client; returns the seconds of each output token."""
        times: list[float] = []
        while time.monotonic() < until:
            body = {
                "model": "m",
                "prompt": text_of(200, self._rng),
                "max_tokens": 128,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "return_token_ids": True,
            }
            last = None
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.monotonic()
                    tokens = len(json.loads(line[6:])["choices"][0].get("token_ids") or ())
                    if last is not None and tokens:
                        times += [(now - last) / tokens] * tokens
                    last = now
        return times


async def measure(url: str, options: argparse.Namespace) -> dict[bool, list[float]]:
    """The plain client's seconds per output token, by whether the others send references."""
    clients = Clients(url, options)
    times: dict[bool, list[float]] = {False: [], True: []}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tasks = [
            asyncio.create_task(clients.send_requests(session)) for _ in range(options.clients)
        ]
        for phase in range(2 * options.phases + 1):  # phase 0 is a warm-up
            clients.with_references = phase % 2 == 1
            await asyncio.sleep(3)
            clients.answered = dict.fromkeys(clients.answered, 0)
            new = await clients.stream(session, time.monotonic() + options.seconds)
            if phase:
                times[clients.with_references] += new
            print(
                f"phase {phase}: {'with' if clients.with_references else 'without'} references, "
                f"{len(new)} tokens, p50 {1e3 * np.median(new):.1f} ms, "
                f"p99 {1e3 * np.percentile(new, 99):.1f} ms; the others had "
                f"{clients.answered[200]} answers and {clients.answered[400]} refusals",
                flush=True,
            )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return times


def main(argv: Sequence[str]) -> int:
    options = parse_args(argv)
    config: dict[str, object] = {
        "method": "lookahead",
        "max_reference_tokens": options.reference_tokens,
    }
    if not options.default_total:
        config["max_live_reference_tokens"] = options.clients * options.reference_tokens
    port = free_port()
    command = ["vllm", "serve", str(options.model), "--served-model-name", "m"]
    command += ["--port", str(port), "--speculative-config", json.dumps(config)]
    command += ["--kv-cache-memory-bytes", str(2 << 30), "--max-model-len", "2048"]
    command += ["--max-num-seqs", str(options.clients + 1)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with serving(command, port, Path(folder) / "server.log") as url:
                times = asyncio.run(measure(url, options))
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    without, with_references = times[False], times[True]
    for name, statistic in (
        ("mean", np.mean),
        ("p50", np.median),
        ("p99", lambda all_times: np.percentile(all_times, 99)),
    ):
        before, after = float(statistic(without)), float(statistic(with_references))
        print(f"{name:>5}: {1e3 * before:.1f} -> {1e3 * after:.1f} ms, {after / before - 1:+.1%}")
    return 0
