"""The file in which a cache outlives its process: written whole or not at all, checked when read.

Its parts, one after another:

    magic (8 bytes), version (u32), length of the header (u32), header (JSON), digest
    of every array that the header names: its bytes, digest

A digest is the BLAKE2b, in 16 bytes, of all that comes before it, earlier digests left out. So a
file that is torn, that another one was written into, or that grew, is not taken for a cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm import __version__
from lookahead_vllm.draft.trie.table import spaces_of

MAGIC = b"LAHCACHE"
VERSION = 4
"""Raise it when the same bytes come to mean something else: hashes, columns, kinds of evidence."""

CHUNK = 1 << 20
"""Bytes that are copied at a time while everyone else waits."""

MAX_HEADER = 64 << 20

MAX_REFUSED = 3
"""Refused files that are kept beside a cache."""

_PREFIX = struct.Struct("<8sII")
_DIGEST = 16
_DTYPES = {np.dtype(code).str for code in "bhiqBHIQefd"}
_NOT_A_CACHE = "it is not a cache of lookahead"


class CacheFileError(ValueError):
    """What is wrong with the file, in one sentence that begins with `it`."""


class ArrayHeader(NamedTuple):
    """What the header says of an array."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Without its digest."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Header(NamedTuple):
    """What a file says of itself."""

    release: str
    """The release of lookahead-vllm that wrote it."""
    created: float
    """When that was, in seconds since 1970."""
    tokenizer: str
    """See `fingerprint`."""
    namespaces: int
    arrays: tuple[ArrayHeader, ...]
    facts: dict[str, Any]
    """What else the proposer wants to know."""


def fingerprint(vocabulary: Mapping[Any, int]) -> str:
    """What tells apart tokenizers that give their ids to different tokens, as 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for index, token in sorted((index, _bytes_of(token)) for token, index in vocabulary.items()):
        digest.update(b"%d %d " % (index, len(token)))
        digest.update(token)
    return digest.hexdigest()


def _bytes_of(token: str | bytes) -> bytes:
    return token if isinstance(token, bytes) else token.encode("utf-8", "surrogatepass")


def fingerprint_without_tokenizer(model: str, vocab_size: int) -> str:
    """What has to do where no tokenizer is loaded; never that of a vocabulary."""
    return "model-" + hashlib.blake2b(f"{vocab_size} {model}".encode(), digest_size=16).hexdigest()


def count_ngrams(arrays: Mapping[str, NDArray[Any]]) -> int:
    """The n-grams of answers, which are those that a file has."""
    return int((spaces_of(arrays["edges"]) > 0).sum())


# ---- writing -------------------------------------------------------------------------------------


def save(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    facts: Mapping[str, Any],
    tokenizer: str,
    stand_back: Callable[[], object] = lambda: None,
) -> int:
    """Write a snapshot of a proposer; the path holds the old file or the new one, always whole.

    The arrays may be in use. They are copied in their order, CHUNK bytes at a time, and the global
    lock of the interpreter is held for each copy: kernels hold it too, so no row is caught while
    it is written. What an array numbers must come before the array that counts the numbers, as
    edges do before counters. `facts` must be older than all of them.

    Requests' own texts are left out.

    Parameters
    ----------
    path : Path
        The file; its directory must exist.
    arrays, facts
        As `NGramTrieProposer.snapshot` returns them.
    tokenizer : str
        The fingerprint of the tokenizer that the token ids are of.
    stand_back : callable
        Called after each chunk: sleeps a little where requests are served meanwhile.

    Returns
    -------
    int
        The length of the file in bytes.

    Raises
    ------
    OSError
        It could not be written; the path is as it was.
    """
    header = _pack_header(arrays, facts, tokenizer)
    _remove_leftovers(path)
    descriptor, temporary = _create_beside(path)
    try:
        with open(descriptor, "wb") as file:
            digest = hashlib.blake2b(header, digest_size=_DIGEST)
            file.write(header + digest.digest())
            for name, array in arrays.items():
                for chunk in _copied_chunks(array, leave_out_private=name == "edges"):
                    digest.update(chunk)
                    file.write(chunk)
                    stand_back()
                file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)
    return size


def _pack_header(
    arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any], tokenizer: str
) -> bytes:
    content = {
        "release": __version__,
        "created": time.time(),
        "tokenizer": tokenizer,
        "namespaces": len(facts["namespaces"]),
        "arrays": [
            {"name": name, "dtype": array.dtype.str, "shape": array.shape, "bytes": array.nbytes}
            for name, array in arrays.items()
        ],
        "facts": facts,
    }
    text = json.dumps(content).encode()
    if len(text) > MAX_HEADER:
        raise OSError(f"there are too many namespaces for one file, {len(facts['namespaces'])}")
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def _copied_chunks(array: NDArray[Any], leave_out_private: bool) -> Iterator[memoryview]:
    """Copies of whole rows, one after another, in the same buffer."""
    source = array.reshape(-1).view(np.uint8).data
    row = array.nbytes // max(1, len(array))
    step = max(1, CHUNK // max(1, row)) * row
    buffer = memoryview(bytearray(min(step, len(source))))
    for start in range(0, len(source), max(1, step)):
        size = min(step, len(source) - start)
        buffer[:size] = source[start : start + size]  # one copy; nobody else runs meanwhile
        chunk = buffer[:size]
        if leave_out_private:
            rows = np.frombuffer(chunk, array.dtype).reshape(-1, *array.shape[1:])
            rows[spaces_of(rows) < 0] = 0
        yield chunk


def _temporary_names(path: Path) -> re.Pattern[str]:
    return re.compile(rf"\.{re.escape(path.name)}\.\d+-[0-9a-f]{{8}}\.tmp")


def _create_beside(path: Path) -> tuple[int, Path]:
    """A new file of ours alone. It is locked, so that nobody takes it for a leftover."""
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(temporary)):
                return descriptor, temporary
        os.close(descriptor)  # removed between the two calls


def _remove_leftovers(path: Path) -> None:
    """Remove what saves left that were killed: a lock goes with its process, in any container."""
    names = _temporary_names(path)
    for name in filter(names.fullmatch, os.listdir(path.parent)):
        with contextlib.suppress(OSError):
            descriptor = os.open(path.with_name(name), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path.with_name(name))
            finally:
                os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Rename a refused file, over no other one; returns where it is now.

    Of those that were set aside earlier, the latest two stay.

    Raises
    ------
    OSError
        It could not be renamed.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    earlier = _set_aside_earlier(path)
    last = max((number for other, number, _ in earlier if other == stamp), default=0)
    for number in range(last + 1, last + 1000):
        suffix = f"-{number}" if number > 1 else ""
        target = path.with_name(f"{path.name}.refused-{stamp}{suffix}")
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        try:
            os.rename(path, target)
        except OSError:
            target.unlink()
            raise
        for _, _, name in earlier[: -MAX_REFUSED + 1]:
            with contextlib.suppress(OSError):
                path.with_name(name).unlink()
        return target
    raise FileExistsError(f"there are too many files {path.name}.refused-{stamp}")


def _set_aside_earlier(path: Path) -> list[tuple[str, int, str]]:
    """The time, the number within that second, and the name of each, the oldest first."""
    pattern = re.compile(rf"{re.escape(path.name)}\.refused-(\d{{8}}T\d{{6}}Z)(?:-(\d+))?")
    found = filter(None, map(pattern.fullmatch, os.listdir(path.parent)))
    return sorted((match[1], int(match[2] or 1), match[0]) for match in found)


# ---- reading -------------------------------------------------------------------------------------


def load(
    path: Path, tokenizer: str | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays and the facts of a snapshot.

    Parameters
    ----------
    path : Path
        The file.
    tokenizer : str, optional
        The fingerprint that the file must have.

    Raises
    ------
    CacheFileError
        It is torn, foreign, of another release's format, of another tokenizer, or another user's.
    OSError
        It cannot be read, or there is none.
    """
    with _open(path) as file:
        owner, user = os.fstat(file.fileno()).st_uid, os.geteuid()
        if owner not in (user, 0):
            raise CacheFileError(f"it belongs to user {owner}, and this server runs as user {user}")
        header, digest = _read_header(file)
        if tokenizer is not None and header.tokenizer != tokenizer:
            raise CacheFileError(
                "it was made with another tokenizer, so that its token ids mean other tokens "
                f"(fingerprint {header.tokenizer}, not {tokenizer})"
            )
        arrays: dict[str, NDArray[Any]] = {}
        for entry in header.arrays:
            array = np.empty(entry.shape, entry.dtype)
            content = array.reshape(-1).view(np.uint8).data
            for start in range(0, len(content), CHUNK):
                part = content[start : start + CHUNK]
                if file.readinto(part) != len(part):  # type: ignore[attr-defined]
                    raise CacheFileError("it became shorter while it was read")
                digest.update(part)
            if file.read(_DIGEST) != digest.digest():
                raise CacheFileError(f"it is damaged: its {entry.name} are not what was written")
            arrays[entry.name] = array
    return arrays, header.facts


def read_header(path: Path) -> Header:
    """What the file says of itself; its arrays are not read.

    Raises
    ------
    CacheFileError, OSError
        As `load`.
    """
    with _open(path) as file:
        return _read_header(file)[0]


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    def opener(name: str, flags: int) -> int:
        # Otherwise opening a pipe would wait for somebody to write into it.
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CacheFileError("it is not a regular file")
        yield file


def _read_header(file: BinaryIO) -> tuple[Header, Any]:
    """The header, and the digest of all that was read."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if not prefix.startswith(MAGIC):
        raise CacheFileError("it is empty" if not prefix else _NOT_A_CACHE)
    if len(prefix) < _PREFIX.size:
        raise CacheFileError("it is cut off")
    _, version, length = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise CacheFileError(
            f"it is of format {version}, and this release of lookahead reads format {VERSION}"
        )
    # No length is believed before it is compared with that of the file.
    if length > MAX_HEADER or length > size - _PREFIX.size - _DIGEST:
        raise CacheFileError("it is cut off, or damaged: its header is longer than the file")
    text = file.read(length)
    digest = hashlib.blake2b(prefix + text, digest_size=_DIGEST)
    if file.read(_DIGEST) != digest.digest():
        raise CacheFileError("it is damaged: its header is not what was written")
    try:
        header = _parse_header(json.loads(text), size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CacheFileError(f"{_NOT_A_CACHE}: its header makes no sense") from None
    needed = file.tell() + sum(entry.num_bytes + _DIGEST for entry in header.arrays)
    if size != needed:
        raise CacheFileError(f"it has {size} bytes where its header needs {needed}")
    return header, digest


def _parse_header(content: Any, size: int) -> Header:
    arrays = []
    for entry in content["arrays"]:
        name, dtype, shape = entry["name"], entry["dtype"], tuple(entry["shape"])
        if not isinstance(name, str) or dtype not in _DTYPES or not 0 < len(shape) <= 4:
            raise ValueError
        if not all(type(length) is int and 0 <= length <= size for length in shape):
            raise ValueError
        arrays.append(ArrayHeader(name, dtype, shape))
    namespaces = content["facts"]["namespaces"]
    if not all(type(space) is int and 0 < space < 2**31 for space in namespaces.values()):
        raise ValueError
    if len({entry.name for entry in arrays}) < len(arrays):
        raise ValueError
    return Header(
        release=str(content["release"]),
        created=float(content["created"]),
        tokenizer=str(content["tokenizer"]),
        namespaces=len(namespaces),
        arrays=tuple(arrays),
        facts=content["facts"],
    )
