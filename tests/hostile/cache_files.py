"""Invalid cache files: a server starts with an empty cache, warns once, and serves."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache import keeper
from lookahead_vllm.draft.cache.keeper import CacheKeeper
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.kept_file import RefusedFileError
from tests.hostile.report import Report

TOKENIZER = cache_file.fingerprint({"a": 0})
OTHER_USER = 65534
TIMEOUT_SECONDS = 60.0
"""Loading and saving a file hangs if it takes longer."""

FILES: dict[str, Callable[[Path], None]] = {}
"""By name: a function that creates the file at a path, next to a valid cache `good`."""
MISSING = {"a link to nothing"}
"""These count as a missing file, which needs no warning."""


def _file(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(create: Callable[[Path], None]) -> Callable[[Path], None]:
        FILES[name] = create
        return create

    return add


def _good(path: Path) -> bytes:
    return path.with_name("good").read_bytes()


for _share in (0, 1, 10, 50, 90, 99):

    @_file(f"torn at {_share} %")
    def _torn(path: Path, share: int = _share) -> None:
        content = _good(path)
        path.write_bytes(content[: len(content) * share // 100])


for _place in (3, 9, 13, 40, 5000, -1):

    @_file(f"one bit wrong at byte {_place}")
    def _damaged(path: Path, place: int = _place) -> None:
        content = bytearray(_good(path))
        content[place] ^= 16
        path.write_bytes(content)


@_file("longer than it was")
def _longer(path: Path) -> None:
    path.write_bytes(_good(path) + b"more")


@_file("a text")
def _text(path: Path) -> None:
    path.write_text("notes of mine\n" * 1000)


@_file("a sparse file of 1 TB")
def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@_file("the beginning of a cache, and 1 TB of nothing")
def _sparse_cache(path: Path) -> None:
    path.write_bytes(_good(path))
    with path.open("r+b") as file:
        file.truncate(2**40)


@_file("a link to a text")
def _link(path: Path) -> None:
    path.with_name("notes").write_text("notes of mine")
    path.symlink_to("notes")


@_file("a link to nothing")
def _dangling(path: Path) -> None:
    path.symlink_to("nothing")


@_file("a link to itself")
def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@_file("a link to an endless device")
def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@_file("a pipe")
def _pipe(path: Path) -> None:
    os.mkfifo(path)


@_file("a link to a pipe")
def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


@_file("a socket")
def _socket(path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        listening.bind(f"/proc/self/fd/{folder_fd}/{path.name}")
    finally:
        os.close(folder_fd)
        listening.close()


@_file("a folder")
def _folder(path: Path) -> None:
    path.mkdir()


@_file("a folder with files")
def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("notes of mine")


if os.geteuid() == 0:

    @_file("another user's cache")
    def _foreign(path: Path) -> None:
        path.write_bytes(_good(path))
        os.chown(path, OTHER_USER, OTHER_USER)

else:

    @_file("a cache that may not be read")
    def _unreadable(path: Path) -> None:
        path.write_bytes(_good(path))
        path.chmod(0)


def _sealed(header: bytes, rest: bytes = b"") -> bytes:
    """The bytes of a file whose header has a valid digest."""
    start = struct.pack("<8sII", cache_file.MAGIC, cache_file.VERSION, len(header)) + header
    return start + blake2b(start, digest_size=16).digest() + rest


def _header(path: Path) -> dict[str, Any]:
    content = _good(path)
    (length,) = struct.unpack_from("<I", content, 12)
    return json.loads(content[16 : 16 + length])


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a header that is a list": lambda header: [],
    "a header that is a number": lambda header: 5,
    "a header without arrays": lambda header: {k: v for k, v in header.items() if k != "arrays"},
    "arrays that are a number": lambda header: {**header, "arrays": 5},
    "an array of 2**62 elements": lambda header: {
        **header,
        "arrays": [{"name": "edges", "dtype": "<u4", "shape": [2**31, 2**31]}],
    },
    "an array of negative length": lambda header: {
        **header,
        "arrays": [{"name": "edges", "dtype": "<u4", "shape": [-1]}],
    },
    "an array of Python objects": lambda header: {
        **header,
        "arrays": [{"name": "edges", "dtype": "|O", "shape": [1]}],
    },
    "facts that are null": lambda header: {**header, "facts": None},
    "namespaces that are a list": lambda header: {**header, "facts": {"namespaces": []}},
    "a namespace that is a text": lambda header: {**header, "facts": {"namespaces": {"a": "b"}}},
    "a time that is none": lambda header: {**header, "created": "yesterday"},
}
for _name, _changed in HEADERS.items():

    @_file(_name)
    def _other_header(path: Path, changed: Callable[[Any], Any] = _changed) -> None:
        path.write_bytes(_sealed(json.dumps(changed(_header(path))).encode(), bytes(100)))


@_file("a header of 100,000 brackets")
def _nested(path: Path) -> None:
    path.write_bytes(_sealed(b"[" * 100_000 + b"]" * 100_000))


@_file("a header that is no UTF-8")
def _no_text(path: Path) -> None:
    path.write_bytes(_sealed(b"\xff\xfe" * 100))


def _saved(path: Path, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    cache_file.save(path, dict(arrays), dict(facts), TOKENIZER)


def _snapshot() -> tuple[dict[str, Any], dict[str, Any]]:
    return _new_proposer().snapshot()


for _array in ("edges", "counters", "rates", "trials", "weights"):

    @_file(f"a cache without its {_array}")
    def _without(path: Path, array: str = _array) -> None:
        arrays, facts = _snapshot()
        _saved(path, {k: v for k, v in arrays.items() if k != array}, facts)

    @_file(f"a cache whose {_array} are of another type")
    def _other_type(path: Path, array: str = _array) -> None:
        arrays, facts = _snapshot()
        _saved(path, {**arrays, array: np.zeros(arrays[array].shape, np.int8)}, facts)


for _facts in ({"suffixes": None}, {"suffixes": [1]}, {"suffixes": {"a": 1}}):

    @_file(f"a cache of {_facts}")
    def _other_facts(path: Path, changed: dict[str, Any] = _facts) -> None:
        arrays, facts = _snapshot()
        _saved(path, arrays, {**facts, **changed})


def _new_proposer() -> NGramTrieProposer:
    return NGramTrieProposer(LookaheadOptions(max_nodes=4096))


def _teach(proposer: NGramTrieProposer, first: int = 5) -> None:
    proposer.start("r", [1])
    proposer.extend({"r": range(first, first + 50)})
    proposer.finish("r")


class _Warnings(logging.Handler):
    """Collects messages of level WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def faults_with(name: str, folder: Path) -> list[str]:
    """Load this file, learn an answer and save; return what goes wrong."""
    cache_folder = folder / "cache"
    shutil.rmtree(cache_folder, ignore_errors=True)
    cache_folder.mkdir()
    earlier = _new_proposer()
    _teach(earlier)
    cache_file.save(cache_folder / "good", *earlier.snapshot(), TOKENIZER)
    path = cache_folder / "a.cache"
    FILES[name](path)
    faults: list[str] = []
    warnings = _Warnings()
    keeper.logger.addHandler(warnings)
    propagates, keeper.logger.propagate = keeper.logger.propagate, False
    proposer = _new_proposer()

    def load_and_save() -> None:
        try:
            keeper = CacheKeeper(proposer, path, 0, TOKENIZER)
            if cache_file.count_ngrams(proposer.snapshot()[0]):
                faults.append("it was loaded")
            _teach(proposer, first=60)
            keeper.close()
        except BaseException as error:
            faults.append(f"it raised {error!r}")

    try:
        thread = threading.Thread(target=load_and_save, daemon=True)
        thread.start()
        thread.join(TIMEOUT_SECONDS)
        if thread.is_alive():
            return ["it hangs"]
    finally:
        keeper.logger.removeHandler(warnings)
        keeper.logger.propagate = propagates
    at_start = [message for message in warnings.messages if "starts cold" in message]
    if len(at_start) != (name not in MISSING):
        faults.append(f"it warned {len(at_start)} times: {at_start}")
    if any("\n" in message or len(message) > 1000 for message in warnings.messages):
        faults.append(f"a warning is not one sentence: {warnings.messages}")
    saves_nothing = any("saves nothing" in message for message in warnings.messages)
    if not saves_nothing:
        try:
            cache_file.load(path, TOKENIZER)
        except (RefusedFileError, OSError) as error:
            faults.append(f"the learned answer was not saved, and there was no warning: {error!r}")
    notes = [*cache_folder.rglob("notes")]
    if any(note.read_text() != "notes of mine" for note in notes):
        faults.append("another file was changed")
    return faults


def load_all(folder: Path, report: Report) -> None:
    """Load every file, and report what goes wrong."""
    for name in FILES:
        report.sent["cache files"] += 1
        for fault in faults_with(name, folder):
            report.violation(f"cache file, {name}: {fault}")
