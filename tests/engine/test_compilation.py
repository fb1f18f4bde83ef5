"""Kernels are compiled by a process of their own, while the engine starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from lookahead_vllm import compilation, kernel_folder
from lookahead_vllm.draft.options import LookaheadOptions
from tests.support.compilers import quick_compiler

ROOT = Path(__file__).parents[2]

GENERATES = """
import sys
from pathlib import Path
from vllm import SamplingParams
from tests.support.driving import engine, generate, random_prompts
prompts = [prompt + prompt for prompt in random_prompts(4, 12)]
with engine(Path(sys.argv[1]), {"proposer": "ngram_trie"}, drafts=None) as llm:
    generate(llm, prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
print("DONE")
"""


@contextmanager
def compiled_in(path: Path) -> Iterator[Path]:
    """Code is kept in a folder of this path, which is returned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKAHEAD_VLLM_CACHE", str(path))
        patch.setattr(kernel_folder, "cache_dir", kernel_folder._persistent_folder)
        patch.setattr(compilation, "cache_dir", kernel_folder._persistent_folder)
        yield kernel_folder._persistent_folder()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder for compiled code."""
    with compiled_in(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For code that two tests compile, to save time; empty at first."""
    return tmp_path_factory.mktemp("compiled")


def test_an_engine_compiles_nothing_itself(llama: Path, shared_folder: Path) -> None:
    with compiled_in(shared_folder) as folder, quick_compiler() as compiler:
        result = subprocess.run(
            [sys.executable, "-c", GENERATES, str(llama)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CXX": compiler},
        )
    assert "DONE" in result.stdout, result.stderr
    (marker,) = folder.glob("compiled-*")  # the last file that the compiling process wrote
    code = [path for path in folder.rglob("*") if path.suffix in (".nbc", ".so")]
    assert len(code) > 40
    assert not [
        path.name for path in code if path.stat().st_mtime_ns > marker.stat().st_mtime_ns
    ], result.stderr


def test_a_second_start_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
from lookahead_vllm.draft.options import LookaheadOptions
class Started(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid)
subprocess.Popen = Started
compilation.begin(LookaheadOptions(), False)
is_free = True
while is_free:
    with compilation._lock(compilation.fcntl.LOCK_SH) as is_free:
        pass
    time.sleep(0.01)
"""


def test_the_process_ends_without_an_error(shared_folder: Path) -> None:
    """Its parent lives on, so its standard input stays open."""
    options = LookaheadOptions(proposer="jacobi_window")
    with compiled_in(shared_folder):
        marker = compilation._marker(options, False)
        assert not marker.exists()
        process = subprocess.Popen(
            [sys.executable, "-m", compilation.__name__, json.dumps([options.to_dict(), False])],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.wait() == 0, process.stderr.read()
    assert marker.exists()


def test_the_process_ends_with_its_parent(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEGINS]
    pid = int(subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE).stdout)
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    with compilation._lock(compilation.fcntl.LOCK_SH) as is_free:
        assert is_free
    assert not list(folder.glob("compiled-*"))  # it ended before it was done
