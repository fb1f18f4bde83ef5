"""Processes of vLLM that start fast: forks of a process that has imported vLLM and nothing else.

On CPUs vLLM spawns its engines and ranks, and each of them imports vLLM for some ten seconds. With

    with forks.enabled(): ...

those that this process and its forks start in the block are forks instead. Their environment, their
cores and their output are those of the process that makes them.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import context, forkserver
from typing import Any
from unittest import mock

PRELOADED = [
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.entrypoints.cli.serve",
]
STARTING = [
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.engine.coordinator",
    "vllm.v1.engine.utils",
]
"""The modules that start processes."""


class Fork(context.ForkServerProcess):
    """A process with the environment, on the cores and with the output of the one that makes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)
        self._cores = os.sched_getaffinity(0)
        self._maker = os.getpid()

    def run(self) -> None:
        """Run the target, in the new process."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.sched_setaffinity(0, self._cores)
        for output in (1, 2):
            with suppress(OSError):  # a socket
                opened = os.open(f"/proc/{self._maker}/fd/{output}", os.O_WRONLY | os.O_APPEND)
                os.dup2(opened, output)
        # Its own forks come from the same server, whose address it has inherited.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        with enabled():
            super().run()


class ForkContext(context.ForkServerContext):
    """Makes forks."""

    Process = Fork


FORKS = ForkContext()
FORKS.set_forkserver_preload(PRELOADED)


@contextmanager
def enabled() -> Iterator[None]:
    """See the module."""
    with ExitStack() as patches:
        for module in STARTING:
            patches.enter_context(mock.patch(f"{module}.get_mp_context", lambda: FORKS))
        yield
