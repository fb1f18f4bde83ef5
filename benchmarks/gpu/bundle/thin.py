"""Takes the GPU code of other architectures out of a shared library, which then compresses well.

A library keeps its GPU code in "fat binaries": a header with the size of what follows, then entries
of machine code or PTX, each with the architecture that it is for. The driver gets the header's
address and takes the entry that fits. Here, the entries to keep are moved up to the header, which
is told their size, and zeros fill what is left, so that nothing else in the file moves.

A fat binary without machine code for the wanted architecture gets the smallest machine code in the
file for another one, and is of no use on that GPU. In vLLM these are kernels for newer GPUs, and
quantized (Marlin) kernels, which would have run from PTX.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x50\xed\x55\xba"
_HEADER = 16
_PTX, _MACHINE_CODE = 1, 2


class _Entry(NamedTuple):
    kind: int
    architecture: int
    code: bytes
    """With the entry's own header."""


def _fat_binaries(data: mmap.mmap) -> Iterator[tuple[int, int, list[_Entry]]]:
    """The place, the end and the entries of each."""
    at = 0
    while (at := data.find(_MAGIC, at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if version != 1 or header != _HEADER or at + header + size > len(data):
            at += len(_MAGIC)
            continue
        place, end, found = at + header, at + header + size, []
        while place < end:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, place)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            last = place + own + payload
            if kind not in (_PTX, _MACHINE_CODE) or own < 32 or last > end:
                raise ValueError(f"an entry of an unknown kind at {place:#x}: {kind}")
            found.append(_Entry(kind, architecture, data[place:last]))
            place = last
        yield at, end, found
        at = end


def thin(path: Path, architecture: int) -> int:
    """Keep only machine code for `architecture`; returns the bytes that became zeros."""
    gone = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        found = list(_fat_binaries(data))
        codes = [e for _, _, entries in found for e in entries if e.kind == _MACHINE_CODE]
        foreign = [entry.code for entry in codes if entry.architecture != architecture]
        filler = min(foreign, key=len, default=b"")
        for at, end, entries in found:
            room = end - at - _HEADER
            own = [e for e in entries if e.kind == _MACHINE_CODE]
            body = b"".join(e.code for e in own if e.architecture == architecture)
            if not body and len(filler) <= room:
                body = filler
            struct.pack_into("<Q", data, at + 8, len(body))
            data[at + _HEADER : end] = body + bytes(room - len(body))
            gone += room - len(body)
    return gone
