"""Ranks that start fast: forks of a process that has imported vLLM and done nothing else.

On CPUs vLLM spawns its ranks, and each of them imports vLLM for some ten seconds. With

    with forked_ranks.enabled(): ...

the ranks that this process starts in the block are forks instead. Their environment and their cores
are those of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from typing import Any
from unittest import mock

from vllm.v1.executor import multiproc_executor

PRELOADED = ["vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"]


class Rank(context.ForkServerProcess):
    """A process with the environment, and on the cores, of the one that makes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)
        self._cores = os.sched_getaffinity(0)

    def run(self) -> None:
        """Run the target, in the new process."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.sched_setaffinity(0, self._cores)
        super().run()


class RankContext(context.ForkServerContext):
    """Makes ranks."""

    Process = Rank


@contextmanager
def enabled() -> Iterator[None]:
    """See the module."""
    ranks = RankContext()
    ranks.set_forkserver_preload(PRELOADED)
    with mock.patch.object(multiproc_executor, "get_mp_context", lambda: ranks):
        yield
