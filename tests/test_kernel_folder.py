"""Compiled code is kept in a folder that only this user can write, or else a temporary one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lookahead_vllm import kernel_folder

ROOT = Path(__file__).parents[1]
NOBODY = 65534


@pytest.fixture(autouse=True)
def _without_chosen_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOOKAHEAD_VLLM_CACHE", "")  # restored after the test
    kernel_folder.cache_dir.cache_clear()
    yield
    kernel_folder.cache_dir.cache_clear()


def below_a_file(root: Path, patch: pytest.MonkeyPatch) -> str:
    root.write_text("")
    return "Not a directory"


def of_another_user(root: Path, patch: pytest.MonkeyPatch) -> str:
    (root / "lookahead_vllm").mkdir(parents=True, mode=0o700)
    patch.setattr(os, "geteuid", lambda: NOBODY)
    return f"belongs to user {os.getuid()}, not to {NOBODY}"


def that_others_may_write_to(root: Path, patch: pytest.MonkeyPatch) -> str:
    (root / "lookahead_vllm").mkdir(parents=True)
    (root / "lookahead_vllm").chmod(0o770)
    return f"run chmod 700 {root / 'lookahead_vllm'}"


def without_a_home(root: Path, patch: pytest.MonkeyPatch) -> str:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    patch.setattr(Path, "home", home)
    patch.delenv("XDG_CACHE_HOME", raising=False)
    patch.setenv("LOOKAHEAD_VLLM_CACHE", "")
    return "Could not determine home directory"


@pytest.mark.parametrize(
    "case", [below_a_file, of_another_user, that_others_may_write_to, without_a_home]
)
def test_an_unsafe_or_unwritable_folder_is_not_used(
    case: Callable[[Path, pytest.MonkeyPatch], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv("LOOKAHEAD_VLLM_CACHE", str(tmp_path / "root"))
    says = case(tmp_path / "root", monkeypatch)
    with monkeypatch.context() as context:
        context.setattr(kernel_folder.atexit, "register", lambda _: None)
        directory = kernel_folder.cache_dir()
    assert tmp_path not in directory.parents
    (directory / "a").write_text("can be written")
    assert directory.stat().st_mode & 0o777 == 0o700
    (warning,) = set(caplog.messages)  # both loggers may propagate a record
    assert says in warning and str(directory) in warning

    # A child process uses the same folder and logs nothing.
    monkeypatch.undo()
    kernel_folder.cache_dir.cache_clear()
    monkeypatch.setenv("LOOKAHEAD_VLLM_CACHE", str(directory.parent))
    assert kernel_folder.cache_dir() == directory and set(caplog.messages) == {warning}
    kernel_folder.shutil.rmtree(directory.parent)


LOOKS = """
import logging, sys
logging.basicConfig(format="WARNED %(message)s", stream=sys.stdout)
from lookahead_vllm.kernel_folder import cache_dir
print("DONE", cache_dir())
"""


def run(code: str, folder: Path | str, *prefix: str, **changes: str) -> tuple[list[str], Path]:
    """Run `code` in a new process; returns its warnings and the folder that it used."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LOOKAHEAD_VLLM_CACHE": str(folder), **changes}
    command = [*prefix, sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    (used,) = (Path(line.split()[1]) for line in lines if line.startswith("DONE"))
    return [line for line in lines if line.startswith("WARNED")], used


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(folder)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_not_used(full_disk: Path) -> None:
    (full_disk / "rest").write_bytes(bytes(240 << 10))
    warnings, used = run(LOOKS, full_disk)
    assert len(warnings) == 1 and full_disk not in used.parents


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
def test_a_user_without_home_gets_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed when the process ends."""
    monkeypatch.delenv("HOME", raising=False)
    unknown = ("setpriv", "--reuid=54321", "--clear-groups")
    (warning,), used = run(LOOKS, "", *unknown, XDG_CACHE_HOME="")
    assert "home directory" in warning and not used.exists()
