"""Compiled code is kept in a folder that only this user can write, or else a temporary one."""

import logging
import os
from collections.abc import Iterator
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
def test_an_unsafe_or_unwritable_folder_is_not_used(case, tmp_path, monkeypatch, caplog):
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
