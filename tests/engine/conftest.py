"""Fixtures of the tests that start engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from lookahead_vllm.engine.worker.v2.grammar_copies import GrammarCopies
from tests.support import forked_ranks, proposers, v2_on_cpu
from tests.support.driving import engine
from tests.support.models import save_tiny_model
from tests.support.ranks import Answers, plain_answers
from tests.support.servers import cores_of
from tests.support.tokenizer import save_tokenizer
from tests.support.v2_on_cpu import implementations  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def _fork_ranks() -> Iterator[None]:
    with forked_ranks.enabled():
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("models")))


RUNNERS = ("v1", "v2")
"""vLLM's model runners; the second one's steps are asynchronous."""


@contextmanager
def _engines_on(runner: str) -> Iterator[str]:
    with v2_on_cpu.enabled() if runner == "v2" else nullcontext():
        yield runner


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs on each of vLLM's model runners.

    A module asks for it with `pytestmark = pytest.mark.usefixtures("runner")`.
    """
    with _engines_on(request.param) as name:
        yield name


@pytest.fixture(scope="module", params=RUNNERS)
def shared_runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """As `runner`, for engines that several tests of a module share."""
    with _engines_on(request.param) as name:
        yield name


@pytest.fixture(autouse=True)
def _clear_recorded() -> Iterator[None]:
    proposers.RECORDED.clear()
    yield


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engine settings: two ranks with a process and a core each, and an empty cache folder."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores_of(2))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return {"tensor_parallel_size": 2}


@pytest.fixture(scope="session")
def _plain_by_runner() -> dict[str, Answers]:
    return {}


@pytest.fixture
def plain_of_two_ranks(
    llama: Path, runner: str, two_ranks: dict[str, Any], _plain_by_runner: dict[str, Answers]
) -> Answers:
    """Plain vLLM's answers on two ranks; computed once for each runner."""
    if runner not in _plain_by_runner:
        with engine(llama, **two_ranks) as llm:
            _plain_by_runner[runner] = plain_answers(llm)
    return _plain_by_runner[runner]


@pytest.fixture
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's copies of grammars are compiled before the first token, on a busy machine too.

    V2 compiles them in the background.
    """
    start = GrammarCopies.start

    def start_and_wait(self: GrammarCopies, new: Any) -> None:
        start(self, new)
        request = self._requests.get(new.req_id)
        while request is not None and request.structured_output_request.grammar is None:
            time.sleep(0.001)

    monkeypatch.setattr(GrammarCopies, "start", start_and_wait)
