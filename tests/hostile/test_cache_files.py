"""A server starts over a cache file that is none, warns once, and saves what it learns.

`tests/draft/cache/test_file.py` tests files whose bytes are wrong.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache import keeper
from lookahead_vllm.draft.cache.keeper import CacheKeeper
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.stepping import read
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer

TOKENIZER = cache_file.fingerprint({"a": 0})
OTHER_USER = 65534
TIMEOUT_SECONDS = 60.0
"""Loading and saving a file hangs if it takes longer."""


def new_proposer() -> NGramTrieProposer:
    return NGramTrieProposer(LookaheadOptions(max_nodes=4096))


def teach(proposer: NGramTrieProposer, first: int) -> None:
    proposer.start("r", [1])
    read(proposer, {"r": range(first, first + 50)})
    proposer.finish("r")


def good(path: Path) -> bytes:
    return path.with_name("good").read_bytes()


def torn(path: Path) -> None:
    path.write_bytes(good(path)[: len(good(path)) // 2])


def a_sparse_file_of_1_tb(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def a_cache_before_1_tb_of_nothing(path: Path) -> None:
    path.write_bytes(good(path))
    os.truncate(path, 2**40)


def a_link_to_a_text(path: Path) -> None:
    path.with_name("notes").write_text("notes of mine")
    path.symlink_to("notes")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_link_to_an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def a_socket(path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        listening.bind(f"/proc/self/fd/{folder_fd}/{path.name}")
    finally:
        os.close(folder_fd)
        listening.close()


def a_folder_with_files(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("notes of mine")


def another_users_cache(path: Path) -> None:
    """Or, where this user cannot give files away, one that may not be read."""
    path.write_bytes(good(path))
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, OTHER_USER)
    else:
        path.chmod(0)


def without(array: str, path: Path) -> None:
    arrays, facts = new_proposer().snapshot()
    cache_file.save(path, {k: v for k, v in arrays.items() if k != array}, facts, TOKENIZER)


def of_another_type(array: str, path: Path) -> None:
    arrays, facts = new_proposer().snapshot()
    arrays = {**arrays, array: np.zeros(arrays[array].shape, np.int8)}
    cache_file.save(path, arrays, facts, TOKENIZER)


def with_suffixes(suffixes: object, path: Path) -> None:
    arrays, facts = new_proposer().snapshot()
    cache_file.save(path, arrays, {**facts, "suffixes": suffixes}, TOKENIZER)


ARRAYS = ("edges", "counters", "rates", "trials", "weights")
FILES: dict[str, Callable[[Path], None]] = {
    **{
        create.__name__: create
        for create in (
            *(torn, a_sparse_file_of_1_tb, a_cache_before_1_tb_of_nothing, a_link_to_a_text),
            *(a_link_to_nothing, a_link_to_itself, a_link_to_an_endless_device, a_pipe),
            *(a_link_to_a_pipe, a_socket, a_folder_with_files, another_users_cache),
        )
    },
    **{f"without_its_{array}": partial(without, array) for array in ARRAYS},
    **{f"{array}_of_another_type": partial(of_another_type, array) for array in ARRAYS},
    **{f"suffixes_{value}": partial(with_suffixes, value) for value in (None, [1], {"a": 1})},
}


@contextmanager
def logged_warnings() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    keeper.logger.addHandler(handler)
    try:
        yield messages
    finally:
        keeper.logger.removeHandler(handler)


@pytest.mark.parametrize("name", FILES)
def test_a_server_starts_over_a_file_that_is_no_cache(name: str, tmp_path: Path) -> None:
    earlier, path = new_proposer(), tmp_path / "a.cache"
    teach(earlier, first=5)
    cache_file.save(tmp_path / "good", *earlier.snapshot(), TOKENIZER)
    FILES[name](path)
    proposer, num_loaded = new_proposer(), []

    def load_and_save() -> None:
        cache = CacheKeeper(proposer, path, 0, TOKENIZER)
        num_loaded.append(cache_file.count_ngrams(proposer.snapshot()[0]))
        teach(proposer, first=60)
        cache.close()

    with logged_warnings() as messages:
        thread = threading.Thread(target=load_and_save, daemon=True)
        thread.start()
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive(), "it hangs"
    assert num_loaded == [0]
    at_start = [message for message in messages if "starts cold" in message]
    assert len(at_start) == (name != "a_link_to_nothing")  # which counts as a missing file
    assert not [message for message in messages if "\n" in message or len(message) > 1000]
    if not any("saves nothing" in message for message in messages):
        cache_file.load(path, TOKENIZER)  # the learned answer
    for note in tmp_path.rglob("notes"):
        assert note.read_text() == "notes of mine"
