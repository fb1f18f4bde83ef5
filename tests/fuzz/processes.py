"""Lookahead's engine in processes of its own, for rounds that compare outputs only."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import LLM

from lookahead_vllm.engine.drafter.recorder import Counters

# Their imports register the load format and the proposers in a worker's process, too.
from tests.support import models as models
from tests.support import proposers
from tests.support.driving import engine
from tests.support.hybrid_models import use_float32_gated_delta
from tests.support.servers import cores_of

use_float32_gated_delta()  # in this process, and in a worker's, which imports this module, too


class WorkerExtension:
    """vLLM adds this class to that of its workers; the methods are for `collective_rpc`."""

    model_runner: Any

    def record_answers(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[list[int]]]
    ) -> None:
        """Record plain vLLM's answers for the proposers of the tests."""
        proposers.RECORDED.clear()
        proposers.record(prompts, answers)

    def draft_counters(self) -> dict[str, int]:
        """The fields of `Counters`."""
        return vars(self.model_runner.drafter.counters)


EXTENSION = f"{__name__}.{WorkerExtension.__name__}"
"""`worker_extension_cls` of vLLM."""


def share_recorded(llm: LLM) -> None:
    """Let the proposers of its workers know the answers that this process has recorded."""
    recorded = proposers.RECORDED
    llm.collective_rpc("record_answers", args=(list(recorded), list(recorded.values())))


@contextmanager
def engine_elsewhere(model: Path, lookahead: dict[str, Any], **settings: Any) -> Iterator[LLM]:
    """As `driving.engine`, with the engine's core in another process.

    With `distributed_executor_backend="mp"` the worker has one of its own. Of replicas, the workers
    alone are in other processes.
    """
    replicas = lookahead.get("parallel", 1)
    workers = max(replicas, settings.get("pipeline_parallel_size", 1))
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if replicas == 1 else "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": cores_of(workers),
    }
    with (
        mock.patch.dict(os.environ, environment),
        engine(
            model,
            speculative_config={"method": "lookahead", **lookahead},
            worker_extension_cls=EXTENSION,
            **settings,
        ) as llm,
    ):
        share_recorded(llm)
        yield llm
        assert not counters_of(llm).failures, "the proposer raised, see the log"


def counters_of(llm: LLM) -> Counters:
    """The counters of an engine of `engine_elsewhere`; those of the worker that drafts."""
    counters = max(llm.collective_rpc("draft_counters"), key=lambda own: own["trees"])
    return Counters(**counters)
