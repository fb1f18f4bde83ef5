"""Fixtures of the tests that start engines."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

from lookahead_vllm.engine.grammar.copies import GrammarCopies
from tests.support import forks, proposers
from tests.support.counted_twice import counted_twice
from tests.support.driving import engine
from tests.support.models import save_tiny_model
from tests.support.ranks import Answers, a_process_each, plain_answers
from tests.support.tokenizer import save_tokenizer
from tests.support.valid_trees import checked_trees


@pytest.fixture(scope="session", autouse=True)
def _fork_processes() -> Iterator[None]:
    with forks.enabled():
        yield


@pytest.fixture(scope="session", autouse=True)
def _check_steps() -> Iterator[None]:
    with counted_twice(), checked_trees():
        yield


@pytest.fixture(scope="session", autouse=True)
def _run_before_there_is_a_kv_cache() -> Iterator[None]:
    """Engines begin with a pass of the model, as they do on a GPU, or if no size of the KV cache is
    given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUWorker, "_should_warm_up_model", lambda self: True, raising=False)
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture(autouse=True)
def _clear_recorded() -> Iterator[None]:
    proposers.RECORDED.clear()
    yield


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Engine settings."""
    with a_process_each(2, tmp_path):
        yield {"tensor_parallel_size": 2}


@pytest.fixture(scope="session")
def _computed() -> list[Answers]:
    return []


@pytest.fixture
def plain_of_two_ranks(llama: Path, two_ranks: dict[str, Any], _computed: list[Answers]) -> Answers:
    """Plain vLLM's answers on two ranks, computed once."""
    if not _computed:
        with engine(llama, **two_ranks) as llm:
            _computed.append(plain_answers(llm))
    return _computed[0]


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Will hold of each preemption whether a step of the request was under way."""
    found: list[bool] = []
    original = Scheduler._preempt_request

    def preempt(self: Scheduler, request: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(request.num_in_flight_tokens > 0)
        return original(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    return found


@pytest.fixture
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's copies of grammars are compiled before the first token, however slowly."""
    start = GrammarCopies.start

    def start_and_wait(self: GrammarCopies, new: Any) -> None:
        start(self, new)
        request = self._requests.get(new.req_id)
        while request is not None and request.structured_output_request.grammar is None:
            time.sleep(0.001)

    monkeypatch.setattr(GrammarCopies, "start", start_and_wait)
