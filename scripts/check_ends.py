"""End engines in many ways, again and again, and see whether what they learned was saved.

    scripts/cpu_env.sh .venv/bin/python scripts/check_ends.py --times 20

Each run starts an engine of a tiny model, whose cache file is saved at the end alone and has the
64 MB of the default `max_nodes`; lets it answer; ends it; waits until every process is gone; and
looks whether the file is whole and holds the n-grams of the answer. Containers are process
namespaces: without the right to make one, leave these ways out with `--only`.

Processes are forked from this one, which has imported vLLM: a start takes seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import requests

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork")

import vllm.entrypoints.cli.main  # noqa: E402
import vllm.entrypoints.cli.serve  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

import lookahead_vllm.engine.worker.v1.cpu_worker  # noqa: E402, F401
from lookahead_vllm.draft.cache import file as cache_file  # noqa: E402
from lookahead_vllm.draft.options import LookaheadOptions  # noqa: E402
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer  # noqa: E402
from tests.support.models import save_tiny_model  # noqa: E402
from tests.support.servers import cores_of, free_port  # noqa: E402
from tests.support.tokenizer import save_tokenizer  # noqa: E402

TOKENS = 200
WAIT = 240  # seconds until an engine has to have started
PROMPT = [5, 6, 7, 8]
CONTAINED = ("pid1", "tty", "shell")

kept: list[Any] = []
"""Lives as long as the process, as the engine of a script does."""


class Way(NamedTuple):
    """How an engine runs, and how it ends."""

    kind: str
    """serve, offline (the engine in processes of its own) or inline (in the script's)."""
    ranks: int
    target: str
    """Who gets the signal: main, group, pid1 (the first process of a container), shell (a shell
    that is the first process and did not `exec`), or tty (Ctrl-C in a container with a terminal);
    exit: the script ends by itself."""
    signal: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}-{self.target}-{self.signal}".removesuffix("-")


def ways() -> Iterator[Way]:
    for ranks in (1, 2):
        for name in ("TERM", "INT"):
            for target in ("main", "group", "pid1", "tty", "shell"):
                yield Way("serve", ranks, target, name)
        for kind in ("offline", "inline"):
            yield Way(kind, ranks, "exit", "")
            for name in ("TERM", "INT"):
                for target in ("main", "group"):
                    yield Way(kind, ranks, target, name)


def settings_of(way: Way, model: Path, cache: Path) -> dict[str, object]:
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 256,
        "attention_backend": "CPU_MLA",
        "tensor_parallel_size": way.ranks,
        "speculative_config": {
            "method": "lookahead",
            "budget": 16,
            "cache_path": str(cache),
            "cache_interval": 0,
        },
    }


def become(way: Way, model: Path, cache: Path, log: Path, port: int) -> None:
    """In a new process: run an engine until it is ended."""
    if os.getpid() > 2:  # else it is done
        os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if way.kind == "inline" else "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of(way.ranks)
    settings = settings_of(way, model, cache)
    if way.kind != "serve":
        kept.append(llm := LLM(**settings))
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS)
        llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        log.with_name("ready").touch()
        while way.target != "exit":
            time.sleep(1)
        return
    if way.target in CONTAINED and os.getpid() > 2:
        # A process that has left its namespace can start no thread, so another program goes on.
        command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, *sys.argv]
        os.execvp(
            "unshare",
            [*command, "--become", json.dumps([way, *map(str, (model, cache, log)), port])],
        )
    if way.target == "shell" and (child := os.fork()):
        # What a shell does that did not `exec`: it waits, and has no handler for SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    sys.argv = ["vllm", "serve", settings.pop("model"), "--host", "127.0.0.1", "--port", str(port)]
    for name, value in settings.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        sys.argv += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    vllm.entrypoints.cli.main.main()


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def tree_of(pid: int) -> list[int]:
    return [pid, *(grandchild for child in children_of(pid) for grandchild in tree_of(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def watch(way: Way, pid: int, cache: Path, log: Path, port: int) -> tuple[str, float]:
    """What came of it, and the seconds from the signal to the end of the first process."""
    tree = [pid]
    try:
        if not answered(way, pid, log, port):
            return f"did not start, see {log}", 0.0
        tree = tree_of(pid)
        start = time.monotonic()
        end(way, pid)
        while alive(pid) and time.monotonic() < start + 60:
            time.sleep(0.01)
        seconds = time.monotonic() - start
        while any(map(alive, tree)) and time.monotonic() < start + max(seconds + 10, 40):
            time.sleep(0.01)
        survivors = sum(map(alive, tree))
        return verdict(cache) + (f", {survivors} processes went on" if survivors else ""), seconds
    finally:
        for member in tree:
            if alive(member):
                os.kill(member, signal.SIGKILL)
        os.waitpid(pid, 0)


def answered(way: Way, pid: int, log: Path, port: int) -> bool:
    """Whether the engine started and said something."""
    deadline = time.monotonic() + WAIT
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
        if way.kind != "serve":
            if log.with_name("ready").exists():
                return True
            continue
        try:
            if requests.get(f"{url}/health", timeout=2).ok:
                return requests.post(f"{url}/v1/completions", json=body, timeout=60).ok
        except requests.ConnectionError:
            pass
    return way.target == "exit" and log.with_name("ready").exists()


def end(way: Way, pid: int) -> None:
    """Send the signal."""
    if way.target == "exit":
        return
    number = signal.Signals[f"SIG{way.signal}"]
    if way.target == "main":
        os.kill(pid, number)
    elif way.target == "group":
        os.killpg(pid, number)
    elif way.target == "tty":  # all processes of the container
        for member in tree_of(pid)[1:]:
            os.kill(member, number)
    else:
        os.kill(children_of(pid)[0], number)


def verdict(cache: Path) -> str:
    """What is in the file."""
    try:
        arrays, _ = cache_file.load(cache)
    except FileNotFoundError:
        return "lost"
    except cache_file.CacheFileError as error:
        return f"damaged: {error}"
    found = cache_file.count_ngrams(arrays)
    return "saved" if found > TOKENS else f"only {found} n-grams"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="runs of each way")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of ways")
    parser.add_argument("--slow", type=float, default=0, help="seconds that a save takes longer")
    parser.add_argument("--list", action="store_true", help="print the names of ways")
    parser.add_argument("--become", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [w for w in ways() if not options.only or any(o in str(w) for o in options.only)]
    if options.list:
        print("\n".join(map(str, chosen)))
        return
    if options.slow:
        sync = os.fsync

        def slow_sync(descriptor: int) -> None:
            time.sleep(options.slow)
            sync(descriptor)

        cache_file.os.fsync = slow_sync
    NGramTrieProposer(LookaheadOptions(max_nodes=4096))  # loads the kernels
    if options.become:
        fields, *paths, port = json.loads(options.become)
        become(Way(*fields), *map(Path, paths), port)
        return
    temporary = Path(tempfile.mkdtemp())
    model = save_tokenizer(save_tiny_model("llama", temporary))
    for way in chosen:
        outcomes: Counter[str] = Counter()
        slowest = 0.0
        for _ in range(options.times):
            folder = Path(tempfile.mkdtemp(dir=temporary))
            what = folder / "a.cache", folder / "log", free_port()
            sys.stdout.flush()
            if not (pid := os.fork()):
                become(way, model, *what)
                return  # the process ends as a script does
            outcome, seconds = watch(way, pid, *what)
            outcomes[outcome] += 1
            slowest = max(slowest, seconds)
            if outcome == "saved":
                shutil.rmtree(folder)
        counts = "; ".join(f"{count} x {outcome}" for outcome, count in outcomes.items())
        print(f"{way!s:22} {counts}; ended in {slowest:.1f} s at most", flush=True)
    shutil.rmtree(temporary)


if __name__ == "__main__":
    main()
