"""Watches a process with an engine: waits for an answer, ends it, and reads its cache file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import requests

from lookahead_vllm.draft.cache import file as cache_file
from tests.ends.ending import Ending
from tests.ends.engine import MAX_TOKENS, PROMPT

START_SECONDS = 240
"""Limit for the start, and for an answer of a server: the machine may be busy."""
END_SECONDS = 60
"""Limit for the first process."""


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(descendant for child in children_of(pid) for descendant in tree_of(child))]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def watch(ending: Ending, pid: int, cache: Path, log: Path, port: int) -> tuple[str, float]:
    """End an engine; returns the result, and how many seconds its first process took to end."""
    tree = [pid]
    try:
        if not has_answered(ending, pid, log, port):
            return f"did not start, see {log}", 0.0
        tree = tree_of(pid)
        start = time.monotonic()
        send_signal(ending, pid)
        while is_alive(pid) and time.monotonic() < start + END_SECONDS:
            time.sleep(0.01)
        seconds = time.monotonic() - start
        while any(map(is_alive, tree)) and time.monotonic() < start + max(seconds + 10, 40):
            time.sleep(0.01)
        survivors = sum(map(is_alive, tree))
        left = f", {survivors} processes went on" if survivors else ""
        return state_of(cache) + left, seconds
    finally:
        for member in tree:
            if is_alive(member):
                os.kill(member, signal.SIGKILL)
        os.waitpid(pid, 0)


def has_answered(ending: Ending, pid: int, log: Path, port: int) -> bool:
    """Wait until the engine has answered a request; False if it did not start."""
    deadline = time.monotonic() + START_SECONDS
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
        if ending.kind != "serve":
            if log.with_name("ready").exists():
                return True
            continue
        try:
            if requests.get(f"{url}/health", timeout=2).ok:
                return requests.post(f"{url}/v1/completions", json=body, timeout=START_SECONDS).ok
        except (requests.ConnectionError, requests.Timeout):
            pass
    return ending.target == "exit" and log.with_name("ready").exists()


def send_signal(ending: Ending, pid: int) -> None:
    """Send the signal to its target."""
    if ending.target == "exit":
        return
    number = signal.Signals[f"SIG{ending.signal}"]
    if ending.target == "main":
        os.kill(pid, number)
    elif ending.target == "group":
        os.killpg(pid, number)
    elif ending.target == "tty":  # all processes of the container
        for member in tree_of(pid)[1:]:
            os.kill(member, number)
    else:
        os.kill(children_of(pid)[0], number)


def state_of(cache: Path) -> str:
    """Whether the file holds the answer's n-grams: "saved", or what is wrong with it."""
    try:
        arrays, _ = cache_file.load(cache)
    except FileNotFoundError:
        return "lost"
    except cache_file.CacheFileError as error:
        return f"damaged: {error}"
    count = cache_file.count_ngrams(arrays)
    return "saved" if count > MAX_TOKENS else f"only {count} n-grams"
