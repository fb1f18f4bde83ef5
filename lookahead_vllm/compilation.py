"""Compiles the kernels in a process of their own, while vLLM starts.

The first start on a machine compiles for some 40 seconds. vLLM needs about as long until its
worker wants the kernels, and leaves the other cores idle. No module of vLLM is imported here, so
the compiling process begins at once.

What compiles when:

- numba's kernels (`draft/`, and those of `verify/` for the host) and the C++ kernels for CPUs
  (`verify/*/cpu.cpp`): here, at the first start on a machine; `kernel_folder.py` keeps them;
- Triton's kernels for GPUs (`verify/*/triton.py`): in each worker before the first request, in
  `empty_batches` and the like; those of recurrent layers in the steps of vLLM's own warm-up;
- a CPU's kernels for the rows of a step (`engine/cpu_kernels/` too): in the worker's warm-up.
"""

import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lookahead_vllm.draft.proposers.registry import CLASS_PATHS, make_proposer
from lookahead_vllm.kernel_folder import cache_dir, sources_of_kernels
from lookahead_vllm.machine import cpu_name
from lookahead_vllm.options.server import AUTO_DECODING_LENGTH, LookaheadOptions

MAX_WAIT_SECONDS = 120.0
"""After this time, a process that needs kernels compiles them itself."""

_POLL_SECONDS = 0.05
_PACKAGE = Path(__file__).parent


def begin(options: LookaheadOptions, on_cpu: bool) -> None:
    """Compile what an engine with these options needs, unless the cache has it; does not wait.

    `on_cpu` is whether the model runs on the CPU. The process ends with this one.
    """
    # The cost of a step is not known yet: many tokens are nearly free on a GPU, few on a CPU.
    options = options.for_step_cost(0 if on_cpu else AUTO_DECODING_LENGTH)
    with suppress(Exception):  # such as no folder, or no process: the engine compiles
        if not _marker(options, on_cpu).exists():
            arguments = json.dumps([asdict(options), on_cpu])
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, arguments],
                stdin=subprocess.PIPE,  # its end tells the process that this one has ended
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            threading.Thread(target=process.wait, daemon=True).start()


def wait() -> None:
    """Wait for a process that compiles; returns at once if there is none."""
    end = time.monotonic() + MAX_WAIT_SECONDS
    with suppress(OSError):
        while time.monotonic() < end:
            with _lock(fcntl.LOCK_SH) as is_free:
                if is_free:
                    return
            time.sleep(_POLL_SECONDS)


def compile_verification() -> None:
    """Compile the kernels that the worker calls itself, so that no request waits for it."""
    from lookahead_vllm.draft.budget.cost import StepWork
    from lookahead_vllm.draft.instructions import pause_unlocked
    from lookahead_vllm.draft.progress import compile_progress
    from lookahead_vllm.draft.tree import DraftForest, DraftTree
    from lookahead_vllm.verify import acceptance
    from lookahead_vllm.verify.layout.node_layout import compile_layout
    from lookahead_vllm.verify.layout.tree_batch import TreeBatch

    forest, zeros = DraftForest.of([DraftTree.from_lists([0, 1], [-1, -1])]), np.zeros(1, np.int64)
    forest.take(zeros, np.ones(1, np.int64))
    forest.padded(np.full(1, 3))
    TreeBatch.build(forest, zeros, zeros, zeros)
    assert forest.branching[0] and len(forest.owners) == 2
    StepWork.of_decodes(forest, zeros, zeros)
    tokens = np.zeros(1, np.int32), np.zeros(2, np.int32)
    paths = acceptance.accepted_paths(forest, *tokens)
    acceptance.emitted_tokens(forest.firsts, zeros, paths, *tokens)
    acceptance.tally(forest, paths)
    acceptance.paths_of_tokens(forest, np.zeros((1, 2), np.int64), np.ones(1, np.int32))
    pause_unlocked()
    compile_progress()
    compile_layout()


def main(arguments: str) -> None:
    """Compile as `begin` says, unless another process does."""
    given, on_cpu = json.loads(arguments)
    options = LookaheadOptions(**given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a C++ compiler that runs may finish
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with _lock(fcntl.LOCK_EX) as is_free:
        if not is_free:
            return
        with ThreadPoolExecutor() as others:
            library = others.submit(_compile_native) if on_cpu else None
            try:
                compile_verification()
                if options.proposer in CLASS_PATHS:
                    small = replace(options, max_nodes=1024, cache_path=None)
                    make_proposer(small.for_model(0))
            except SystemExit:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise
        if library is None or library.exception() is None:
            _marker(options, on_cpu).touch()


def _compile_native() -> None:
    from lookahead_vllm.verify import native

    native.load()


def _end_with_parent() -> None:
    while os.read(0, 1024):  # without a lock, which would be held when Python ends
        pass
    while True:  # Python ignores what is raised while it frees an object
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_POLL_SECONDS)


@contextmanager
def _lock(kind: int) -> Iterator[bool]:
    """Take the lock of the process that compiles; yields whether it was free."""
    path = cache_dir() / "compiling.lock"
    with path.open("a+b") as file:  # NFS shares a lock of a file that can be read
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _marker(options: LookaheadOptions, on_cpu: bool) -> Path:
    """A file that exists once everything is compiled; the name tells what the code depends on."""
    sources = [*sources_of_kernels(_PACKAGE), *sorted(_PACKAGE.rglob("cpu.cpp"))]
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources))
    facts = [
        str(_PACKAGE),
        platform.python_version(),
        version("numba"),
        cpu_name(),
        on_cpu,
        options.proposer,
    ]
    digest.update(json.dumps(facts).encode())
    return cache_dir() / f"compiled-{digest.hexdigest()[:16]}"


if __name__ == "__main__":
    main(sys.argv[1])
