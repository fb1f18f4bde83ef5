"""The compiled CPU kernels: built from all `cpu.cpp` at first use, cached, loaded with ctypes."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch  # noqa: F401  before the library, so that both use the OpenMP runtime of torch

from lookahead_vllm.kernel_folder import cache_dir

_SOURCES = sorted(Path(__file__).parent.glob("*/cpu.cpp"))
# No -ffast-math: masked scores are -inf, and unused slots may hold NaN.
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
]

_MAX_SECONDS = 300.0
"""A compiler that has not ended after this time is ended."""
_LOAD_ERRORS = (OSError, AttributeError, UnicodeDecodeError)
"""What loading a library raises. ctypes decodes the loader's message, which names the file, as
strict UTF-8."""

NO_COMPILER = (
    "lookahead compiles kernels for this CPU, but there is no C++ compiler; install g++, or set CXX"
)


class KernelError(RuntimeError):
    """The kernels for CPUs cannot be compiled or loaded."""


pointer, i64, i32, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def fields(kind: type, *names: str) -> list[tuple[str, type]]:
    """Fields of a structure that are all of one kind."""
    return [(name, kind) for name in names]


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled library.

    A build takes seconds, so an engine calls this at start-up. Builds are kept in
    `kernel_folder.cache_dir()`, named by a hash of sources, flags, compiler and CPU.

    Raises
    ------
    KernelError
        One sentence, which may be followed by what the compiler or the loader says.
    """
    if (compiler := find_compiler()) is None:
        raise KernelError(NO_COMPILER)
    try:
        path = cache_dir() / f"verify-{_fingerprint(compiler)}.so"
        if path.exists():
            with suppress(*_LOAD_ERRORS):  # damaged: build it again
                return _open(path)
        _build(compiler, path)
        return _open(path)
    except (*_LOAD_ERRORS, subprocess.SubprocessError) as error:
        raise KernelError(f"lookahead's kernels for CPUs cannot be used: {error}") from error


def find_compiler() -> str | None:
    """The C++ compiler: `$CXX`, `g++` or `c++`."""
    names = filter(None, (os.environ.get("CXX"), "g++", "c++"))
    return next(filter(None, map(shutil.which, names)), None)


def _fingerprint(compiler: str) -> str:
    parts = [source.read_bytes() for source in _SOURCES]
    parts.append(" ".join(_FLAGS).encode())
    parts.append(_run([compiler, "--version"]).encode())
    cpu_fields = (b"model name", b"flags", b"Features", b"CPU part")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        parts += sorted({line for line in lines if line.startswith(cpu_fields)})
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _build(compiler: str, path: Path) -> None:
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", temporary]
        # The compiler's temporary files go beside the library, because /tmp may be full.
        _run(command, TMPDIR=str(path.parent))
        os.replace(temporary, path)  # atomic: other processes see the old file or the new one
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str], **environment: str) -> str:
    """What a compiler prints. If it fails, the error has its messages and how it ended."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_MAX_SECONDS,
        env=os.environ | environment,
        encoding="locale",
        errors="backslashreplace",  # it may print any bytes; escapes can be logged everywhere
    )
    if done.returncode:
        ended = subprocess.CalledProcessError(done.returncode, command[0])
        raise OSError(f"{ended} {done.stderr.strip()[-2000:]}".rstrip())
    return done.stdout


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    of_layers = [pointer, pointer, i32, i32], i32
    for name, (arguments, result) in {
        "tree_attention": ([pointer, pointer, i32], None),
        "reads_packed": ([], i32),
        "move_kv": ([pointer, i64, i64, i64, i64, pointer, pointer, i32, i32], None),
        "mamba2": of_layers,
        "gated_delta": of_layers,
        "convolution": of_layers,
    }.items():
        function = getattr(library, f"lookahead_{name}")
        function.argtypes, function.restype = arguments, result
    return library
