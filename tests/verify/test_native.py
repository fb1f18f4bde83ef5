"""Compiled kernels are built once and kept; without them one error says why."""

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.kernel_folder import cache_dir
from lookahead_vllm.verify import native
from tests.support.attention_cases import ROUNDING, AttentionCase, random_tree

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for compiled kernels, empty; no library is loaded."""
    monkeypatch.setenv("LOOKAHEAD_VLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "load", functools.cache(native.load.__wrapped__))
    cache_dir.cache_clear()
    yield cache_dir()
    cache_dir.cache_clear()


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FLAGS", [*native._FLAGS, "-O0"])


def choose_compiler(script: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make a shell script the compiler."""
    program = folder / "compiler"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o700)
    patch.setenv("CXX", str(program))


@pytest.mark.usefixtures("quick_build")
def test_a_damaged_build_is_rebuilt(folder):
    compiler = native.find_compiler()
    assert compiler is not None
    path = folder / f"verify-{native._fingerprint(compiler)}.so"
    path.write_bytes(b"not a library")
    native.load()
    assert list(folder.iterdir()) == [path]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are for x86")
@pytest.mark.parametrize("flag", ["-mno-avx512bf16", "-mno-avx512f", "-march=x86-64"])
def test_builds_for_older_processors_are_exact(flag, monkeypatch):
    monkeypatch.setattr(native, "_FLAGS", [*native._FLAGS, "-O1", flag])
    trees = [random_tree(np.random.default_rng(4), 17), DraftTree.chain(range(3))]
    options = {"window": 150, "alibi": True, "soft_cap": 30.0, "sinks": True, "nan_node": True}
    for dtype in ROUNDING:
        AttentionCase(trees, [300, 5], head_size=80, block_size=48, dtype=dtype).check()
        AttentionCase(trees, [300, 5], head_size=64, dtype=dtype, **options).check()


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(native.KernelError, match="there is no C\\+\\+ compiler; install g\\+\\+"):
        native.load()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (r'printf "caf\351" >&2; exit 1', r"returned non-zero exit status 1. caf\xe9"),
        (r'[ "$1" = --version ] || { printf "caf\351" >&2; exit 1; }', r"status 1. caf\xe9"),
        ('[ "$1" = --version ] || kill -9 $$', "died with <Signals.SIGKILL: 9>."),
        ("exec sleep 600", "timed out after 3 seconds"),
        ("exit 0", "file too short"),
    ],
)
def test_an_unusable_compiler_is_named(script, says, tmp_path, monkeypatch):
    if "sleep" in script:
        monkeypatch.setattr(native, "_MAX_SECONDS", 3)
    choose_compiler(script, tmp_path, monkeypatch)
    with pytest.raises(native.KernelError) as error:
        native.load()
    message = str(error.value)
    assert message.endswith(says) and "b'" not in message


@pytest.mark.usefixtures("quick_build")
def test_a_compiler_may_print_any_bytes(tmp_path, monkeypatch):
    prints = r'printf "\244\242" | tee /dev/stderr'
    choose_compiler(f'{prints}; exec {native.find_compiler()} "$@"', tmp_path, monkeypatch)
    native.load()


LOADS = """
from lookahead_vllm.verify import native
try:
    native.load()
except native.KernelError as error:
    print(error)
"""


def test_its_messages_can_be_printed_in_an_ascii_locale(tmp_path, monkeypatch):
    choose_compiler('echo "no ‘file’" >&2; [ "$1" = --version ]', tmp_path, monkeypatch)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", LOADS],
        env={**os.environ, **ascii_only, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    assert rb"no \xe2\x80\x98file\xe2\x80\x99" in result.stdout
