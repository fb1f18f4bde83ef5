"""A kept file is replaced as a whole or not at all, and a refused one is set aside."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lookahead_vllm import kept_file
from lookahead_vllm.kept_file import (
    LEFTOVER_SECONDS,
    RefusedFileError,
    reading,
    replacing,
    set_aside,
)


def write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def read(path: Path) -> bytes:
    with reading(path) as file:
        return file.read()


def test_a_kill_while_it_is_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write(path, b"old")
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        with replacing(path) as file:
            file.write(b"new")
            file.flush()
            os.write(sending, b".")
            signal.pause()
    os.read(receiving, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert read(path) == b"old"
    (leftover,) = set(tmp_path.iterdir()) - {path}
    write(path, b"another process may be writing the leftover")
    assert leftover.exists()
    before = time.time() - LEFTOVER_SECONDS - 1
    os.utime(leftover, (before, before))
    write(path, b"new")
    assert list(tmp_path.iterdir()) == [path] and read(path) == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, b"new")
    assert read(path) == b"old" and list(tmp_path.iterdir()) == [path]


def test_of_concurrent_writes_one_wins(tmp_path):
    path = tmp_path / "a"
    torn = []

    def write_often(number: int) -> None:
        for _ in range(20):
            write(path, bytes([number]) * 100_000)
            torn.extend([content for content in [read(path)] if len(set(content)) != 1])

    threads = [threading.Thread(target=write_often, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn and list(tmp_path.iterdir()) == [path]


def test_a_path_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedFileError, match="it is not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")


@pytest.mark.parametrize(("owner", "is_refused"), [(0, False), (1000, False), (1234, True)])
def test_a_file_of_another_user_than_this_one_and_root_is_refused(
    tmp_path, monkeypatch, owner, is_refused
):
    path = tmp_path / "a"
    write(path, b"content")
    found = list(path.stat())
    found[4] = owner
    monkeypatch.setattr(kept_file.os, "fstat", lambda descriptor: os.stat_result(found))
    monkeypatch.setattr(kept_file.os, "geteuid", lambda: 1000)
    if is_refused:
        with pytest.raises(RefusedFileError, match="it belongs to user 1234, and this"):
            read(path)
    else:
        assert read(path) == b"content"


def test_a_refused_file_is_set_aside_in_place_of_an_older_one(tmp_path):
    for content in "12":
        (tmp_path / "a").write_text(content)
        target = set_aside(tmp_path / "a")
        assert [*tmp_path.iterdir()] == [target] and target.read_text() == content
    with pytest.raises(FileNotFoundError):
        set_aside(tmp_path / "a")
