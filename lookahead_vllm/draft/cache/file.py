"""The format of the cache file. Every read verifies digests.

The file consists of, in order:

    magic (8 bytes), version (u32), length of the header (u32), header (JSON), digest
    for each array in the header: its bytes, digest

A digest is the 16-byte BLAKE2b of all bytes before it except earlier digests. So a file that is
truncated, extended or changed is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm import __version__
from lookahead_vllm.draft.trie.table import spaces_of
from lookahead_vllm.kept_file import RefusedFileError, reading, replacing

MAGIC = b"LAHCACHE"
VERSION = 5
"""The version of the format. Raise it when hashes, columns or kinds of evidence change."""

CHUNK_BYTES = 1 << 20
"""The number of bytes copied at a time, while the global interpreter lock is held."""

MAX_HEADER_BYTES = 64 << 20

_MESSAGE_ID = re.compile("[0-9]{1,20}-[0-9]{1,20}")
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 16
_DTYPES = {np.dtype(code).str for code in "bhiqBHIQefd"}
_NOT_A_CACHE = "it is not a cache of lookahead"


class ArrayHeader(NamedTuple):
    """An array's entry in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The header of a cache file."""

    release: str
    """The release of lookahead-vllm that wrote it."""
    created: float
    """The time of the save, in seconds since 1970."""
    tokenizer: str
    """The `fingerprint` of the tokenizer."""
    namespaces: int
    """The number of namespaces."""
    arrays: tuple[ArrayHeader, ...]
    facts: dict[str, Any]
    """The proposer's metadata; see `Cacheable.snapshot`."""


def fingerprint(vocabulary: Mapping[Any, int]) -> str:
    """A hash of the mapping from tokens to ids, as 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for token_id, token in sorted((i, _bytes_of(token)) for token, i in vocabulary.items()):
        digest.update(b"%d %d " % (token_id, len(token)))
        digest.update(token)
    return digest.hexdigest()


def _bytes_of(token: str | bytes) -> bytes:
    return token if isinstance(token, bytes) else token.encode("utf-8", "surrogatepass")


def fingerprint_without_tokenizer(model: str, vocab_size: int) -> str:
    """The fingerprint used if no tokenizer is loaded; it never equals that of a vocabulary."""
    return "model-" + hashlib.blake2b(f"{vocab_size} {model}".encode(), digest_size=16).hexdigest()


def sizes_of_spaces(arrays: Mapping[str, NDArray[Any]]) -> dict[int, int]:
    """The number of n-grams of answers in each space of a snapshot that has some."""
    spaces = spaces_of(arrays["edges"])
    found, sizes = np.unique(spaces[spaces > 0], return_counts=True)
    return dict(zip(found.tolist(), sizes.tolist(), strict=True))


def count_ngrams(arrays: Mapping[str, NDArray[Any]]) -> int:
    """The number of n-grams of answers in a snapshot; a file holds no others."""
    return int((spaces_of(arrays["edges"]) > 0).sum())


# ---- writing -------------------------------------------------------------------------------------


def save(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    facts: Mapping[str, Any],
    tokenizer: str,
    after_chunk: Callable[[], object] = lambda: None,
) -> int:
    """Write a snapshot of a proposer, atomically.

    The proposer may be running. The arrays are copied in order, CHUNK_BYTES at a time, with the
    global interpreter lock held during each copy. Kernels hold it too, so no row is copied half
    written. An array that contains numbers must precede the array that counts them, as edges
    precede counters. `facts` must be older than all arrays.

    Edges of live requests' own texts are written as zeros.

    Parameters
    ----------
    path : Path
        The file; its directory must exist.
    arrays, facts
        The result of `Cacheable.snapshot`.
    tokenizer : str
        The fingerprint of the tokenizer.
    after_chunk : callable
        Called after each chunk. It may sleep, and an exception from it cancels the save.

    Returns
    -------
    int
        The size of the file in bytes.

    Raises
    ------
    OSError
        The file could not be written; an existing one is unchanged.
    """
    header = _pack_header(arrays, facts, tokenizer)
    with replacing(path) as file:
        digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
        file.write(header + digest.digest())
        for name, array in arrays.items():
            for chunk in _copied_chunks(array, leave_out_private=name == "edges"):
                digest.update(chunk)
                file.write(chunk)
                after_chunk()
            file.write(digest.digest())
        return file.tell()


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
    if len(text) > MAX_HEADER_BYTES:
        raise OSError(f"there are too many namespaces for one file, {len(facts['namespaces'])}")
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def _copied_chunks(array: NDArray[Any], leave_out_private: bool) -> Iterator[memoryview]:
    """Copy the array in chunks of whole rows; each chunk overwrites the buffer of the last."""
    source = array.reshape(-1).view(np.uint8).data
    row_bytes = array.nbytes // max(1, len(array))
    chunk_bytes = max(1, CHUNK_BYTES // max(1, row_bytes)) * row_bytes
    buffer = memoryview(bytearray(min(chunk_bytes, len(source))))
    for start in range(0, len(source), max(1, chunk_bytes)):
        size = min(chunk_bytes, len(source) - start)
        buffer[:size] = source[start : start + size]  # one copy, which no kernel interrupts
        chunk = buffer[:size]
        if leave_out_private:
            rows = np.frombuffer(chunk, array.dtype).reshape(-1, *array.shape[1:])
            rows[spaces_of(rows) < 0] = 0
        yield chunk


# ---- reading -------------------------------------------------------------------------------------


def load(
    path: Path, tokenizer: str | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read the arrays and the facts of a snapshot.

    Parameters
    ----------
    path : Path
        The file.
    tokenizer : str, optional
        The fingerprint that the file must have; any if omitted.

    Raises
    ------
    RefusedFileError
        As `kept_file.reading`, or it is damaged, is no cache, or has another format or tokenizer.
    OSError
        The file is missing or cannot be read.
    """
    with reading(path) as file:
        header, digest = _read_header(file)
        if tokenizer is not None and header.tokenizer != tokenizer:
            raise RefusedFileError(
                "it was made with another tokenizer, so that its token ids mean other tokens "
                f"(fingerprint {header.tokenizer}, not {tokenizer})"
            )
        arrays: dict[str, NDArray[Any]] = {}
        for entry in header.arrays:
            array = np.empty(entry.shape, entry.dtype)
            content = array.reshape(-1).view(np.uint8).data
            for start in range(0, len(content), CHUNK_BYTES):
                part = content[start : start + CHUNK_BYTES]
                if file.readinto(part) != len(part):  # type: ignore[attr-defined]
                    raise RefusedFileError("it became shorter while it was read")
                digest.update(part)
            if file.read(_DIGEST_BYTES) != digest.digest():
                raise RefusedFileError(f"it is damaged: its {entry.name} are not what was written")
            arrays[entry.name] = array
    return arrays, header.facts


def read_header(path: Path) -> Header:
    """Read only the header.

    Raises
    ------
    RefusedFileError, OSError
        As `load`.
    """
    with reading(path) as file:
        return _read_header(file)[0]


def _read_header(file: BinaryIO) -> tuple[Header, Any]:
    """The header, and the BLAKE2b state after it."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if not prefix.startswith(MAGIC):
        raise RefusedFileError("it is empty" if not prefix else _NOT_A_CACHE)
    if len(prefix) < _PREFIX.size:
        raise RefusedFileError("it is cut off")
    _, version, length = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise RefusedFileError(
            f"it is of format {version}, and this release of lookahead reads format {VERSION}"
        )
    # Nothing is allocated from a length that the size of the file contradicts.
    if length > MAX_HEADER_BYTES or length > size - _PREFIX.size - _DIGEST_BYTES:
        raise RefusedFileError("it is cut off, or damaged: its header is longer than the file")
    text = file.read(length)
    digest = hashlib.blake2b(prefix + text, digest_size=_DIGEST_BYTES)
    if file.read(_DIGEST_BYTES) != digest.digest():
        raise RefusedFileError("it is damaged: its header is not what was written")
    try:
        header = _parse_header(json.loads(text), size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RefusedFileError(f"{_NOT_A_CACHE}: its header makes no sense") from None
    sizes = [math.prod(entry.shape) * np.dtype(entry.dtype).itemsize for entry in header.arrays]
    needed = file.tell() + sum(sizes) + _DIGEST_BYTES * len(sizes)
    if size != needed:
        raise RefusedFileError(f"it has {size} bytes where its header needs {needed}")
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
    followed = content["facts"].get("followed", {})
    if not all(_MESSAGE_ID.fullmatch(position) for position in followed.values()):
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
