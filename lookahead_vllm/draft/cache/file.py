"""The format of the cache file: a `.npz` of NumPy, whose parts have checksums.

`about` comes first, in JSON: the format, what wrote the file, and the proposer's facts. The arrays
follow, a part for each.
"""

import hashlib
import json
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm import __version__
from lookahead_vllm.draft.trie.table import spaces_of
from lookahead_vllm.kept_file import RefusedFileError, reading, replacing

FORMAT = 6
"""Raise it when hashes, columns or kinds of evidence change."""

CHUNK_BYTES = 1 << 20
"""The number of bytes copied at a time, while the global interpreter lock is held."""

_ABOUT = "about"
_MESSAGE_ID = re.compile("[0-9]{1,20}-[0-9]{1,20}")


class About(NamedTuple):
    """What a cache file tells of itself."""

    format: int
    release: str
    """The release of lookahead-vllm that wrote it."""
    created: float
    """The time of the save, in seconds since 1970."""
    tokenizer: str
    """The `fingerprint` of the tokenizer."""
    facts: dict[str, Any]
    """The proposer's metadata; see `NGramTrieProposer.snapshot`."""


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


def count_ngrams(arrays: Mapping[str, NDArray[Any]]) -> int:
    """The number of n-grams of answers in a snapshot; a file holds no others."""
    return int((spaces_of(arrays["edges"]) > 0).sum())


# ---- writing -------------------------------------------------------------------------------------


Copy = Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]
"""Copies bytes from the first array to the second."""


def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    target.data[:] = source.data  # with the global interpreter lock, as kernels


def save(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    facts: Mapping[str, Any],
    tokenizer: str,
    after_chunk: Callable[[], object] = lambda: None,
    copy: Copy = _copy,
) -> int:
    """Write a snapshot of a proposer, atomically.

    The proposer may be running. The arrays are copied in order, CHUNK_BYTES at a time, each chunk
    by one call of `copy`, so no row is copied half written. An array that contains numbers must
    precede the array that counts them, as edges precede counters. `facts` must be older than all
    arrays.

    Edges of live requests' own texts are written as zeros. Returns the size of the file in bytes.

    Parameters
    ----------
    arrays, facts
        The result of `NGramTrieProposer.snapshot`.
    tokenizer : str
        The fingerprint of the tokenizer.
    after_chunk : callable
        Called after each chunk. It may sleep, and an exception from it cancels the save.
    copy : callable
        The proposer's, if threads may write to its arrays without the global interpreter lock.

    Raises
    ------
    OSError
        The file could not be written; an existing one is unchanged.
    """
    about = About(FORMAT, __version__, time.time(), tokenizer, dict(facts))
    npy: Any = np.lib.format
    with replacing(path) as file:
        with zipfile.ZipFile(file, "w") as archive:
            with archive.open(_ABOUT, "w") as part:
                part.write(json.dumps(about._asdict()).encode())
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                    npy.write_array_header_1_0(part, npy.header_data_from_array_1_0(array))
                    for chunk in _copied_chunks(array, name == "edges", copy):
                        part.write(chunk.data)
                        after_chunk()
        return file.tell()


def _copied_chunks(
    array: NDArray[Any], leave_out_private: bool, copy: Copy
) -> Iterator[NDArray[np.uint8]]:
    """Copy the array in chunks of whole rows; each chunk overwrites the buffer of the last."""
    source = array.reshape(-1).view(np.uint8)
    row_bytes = array.nbytes // max(1, len(array))
    chunk_bytes = max(1, CHUNK_BYTES // max(1, row_bytes)) * row_bytes
    buffer = np.empty(min(chunk_bytes, len(source)), np.uint8)
    for start in range(0, len(source), max(1, chunk_bytes)):
        size = min(chunk_bytes, len(source) - start)
        chunk = buffer[:size]
        copy(source[start : start + size], chunk)
        if leave_out_private:
            rows = chunk.view(array.dtype).reshape(-1, *array.shape[1:])
            rows[spaces_of(rows) < 0] = 0
        yield chunk


# ---- reading -------------------------------------------------------------------------------------


def load(
    path: Path, tokenizer: str | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read the arrays and the facts of a snapshot.

    Parameters
    ----------
    tokenizer : str, optional
        The fingerprint that the file must have; any if omitted.

    Raises
    ------
    RefusedFileError
        As `kept_file.reading`, or it is damaged, is no cache, or has another format or tokenizer.
    OSError
        The file is missing or cannot be read.
    """
    with _parts(path) as parts:
        about = _about(parts)
        if tokenizer is not None and about.tokenizer != tokenizer:
            raise RefusedFileError(
                "it was made with another tokenizer, so that its token ids mean other tokens "
                f"(fingerprint {about.tokenizer}, not {tokenizer})"
            )
        return {name: parts[name] for name in parts if name != _ABOUT}, about.facts


def read_about(path: Path) -> About:
    """Read only what the file tells of itself; errors are those of `load`."""
    with _parts(path) as parts:
        return _about(parts)


@contextmanager
def _parts(path: Path) -> Iterator[Any]:
    """The parts of a file by their names, each checked when it is read."""
    with reading(path) as file:
        try:
            with np.load(file, allow_pickle=False) as parts:
                yield parts
        except RefusedFileError:
            raise
        except Exception as error:  # of many types
            sentence = "it is damaged, or not a cache of this release of lookahead"
            raise RefusedFileError(sentence) from error


def _about(parts: Any) -> About:
    about = About(**json.loads(parts[_ABOUT]))
    if about.format != FORMAT:
        raise RefusedFileError(
            f"it is of format {about.format}, and this release of lookahead reads format {FORMAT}"
        )
    spaces, followed = about.facts["namespaces"], about.facts.get("followed", {})
    if not all(type(space) is int and 0 < space < 2**31 for space in spaces.values()):
        raise ValueError("a namespace has a wrong number")
    if not all(_MESSAGE_ID.fullmatch(position) for position in followed.values()):
        raise ValueError("a message has a wrong id")
    return about
