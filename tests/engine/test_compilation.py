"""Kernels are compiled by a process of their own, while the engine starts."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from lookahead_vllm import compilation, kernel_folder
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.driving import engine, generate, random_prompts
from tests.support.kernels import compiled_since, reset_kernels

ROOT = Path(__file__).parents[2]

COMPILES = """
import contextlib, json, sys
from lookahead_vllm import compilation
from tests.support.kernels import compiled
compilation._lock = lambda kind: contextlib.nullcontext(True)  # others may compile meanwhile
compilation.main(sys.argv[1])
print(json.dumps(compiled()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for compiled code."""
    monkeypatch.setenv("LOOKAHEAD_VLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_folder, "cache_dir", kernel_folder._persistent_folder)
    monkeypatch.setattr(compilation, "cache_dir", kernel_folder._persistent_folder)
    return kernel_folder._persistent_folder()


ROWS = tuple(
    f"lookahead_vllm.{module}."
    for module in ("engine.cpu_kernels", "verify.history", "verify.place", "verify.walk")
)
"""The kernels of a CPU's rows take vLLM's buffers, so the worker's warm-up compiles them."""


def test_the_process_compiles_all_that_an_engine_runs(llama, monkeypatch):
    """The engine waits for the process, whose parent lives on: its standard input stays open."""
    options = LookaheadOptions(proposer="ngram_trie")
    marker = compilation._marker(options, True)
    marker.unlink(missing_ok=True)
    process = subprocess.run(
        [sys.executable, "-c", COMPILES, json.dumps([asdict(options), True])],
        stdin=os.pipe()[0],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert marker.exists()
    waited: list[bool] = []
    monkeypatch.setattr(compilation, "wait", lambda: waited.append(True))
    reset_kernels()
    with engine(llama, {"proposer": "ngram_trie"}, drafts=None) as llm:
        generate(llm, [prompt * 2 for prompt in random_prompts(4, 12)])
    assert waited
    found = compiled_since(json.loads(process.stdout))
    assert not [name for name in found if not name.startswith(ROWS)]


def test_a_second_start_compiles_nothing(folder, monkeypatch):
    started: list[object] = []
    monkeypatch.setattr(compilation.subprocess, "Popen", lambda *a, **k: started.append(a))
    monkeypatch.setattr(compilation.threading, "Thread", lambda *a, **k: pytest.fail("no process"))
    options = LookaheadOptions()
    for named in (options, LookaheadOptions(proposer="ngram_trie")):
        compilation._marker(LookaheadOptions(proposer="ngram_trie"), True).touch()
        compilation.begin(named, True)
    assert not started


BEGINS = """
import subprocess, time
from lookahead_vllm import compilation
from lookahead_vllm.options.server import LookaheadOptions
class Started(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        started.append(self)
subprocess.Popen = Started
started, is_free = [], True
while is_free:
    if not started or started[-1].poll() is not None:  # it tried when the lock was looked at here
        compilation.begin(LookaheadOptions(), False)
    time.sleep(0.01)
    with compilation._lock(compilation.fcntl.LOCK_SH) as is_free:
        pass
print(started[-1].pid)
"""


def test_the_process_ends_with_its_parent(folder):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEGINS]
    pid = int(subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE).stdout)
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    with compilation._lock(compilation.fcntl.LOCK_SH) as is_free:
        assert is_free
    assert not list(folder.glob("compiled-*"))  # it ended before it was done


SWALLOWS = """
import json, sys, time
from dataclasses import asdict
from lookahead_vllm import compilation
from lookahead_vllm.options.server import LookaheadOptions
def compiles():
    try:
        print("compiles", flush=True)
        time.sleep(120)
    except SystemExit:
        time.sleep(120)
compilation.compile_verification = compiles
compilation.main(json.dumps([asdict(LookaheadOptions()), False]))
"""


def test_it_ends_although_python_ignores_an_exception(folder):
    """As where one is raised in a `__del__`, of which a compiler has many."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SWALLOWS]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(timeout=30) == 1
    assert not list(folder.glob("compiled-*"))
