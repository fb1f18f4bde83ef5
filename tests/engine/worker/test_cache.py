"""The cache file keeps what an engine learned."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer
from vllm import envs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.draft.trie.table import PRUNED
from lookahead_vllm.engine import shutdown
from lookahead_vllm.engine.worker import drafter as drafter_module
from lookahead_vllm.engine.worker.cache import fingerprint_of, open_cache
from lookahead_vllm.engine.worker.drafter import LookaheadDrafter
from lookahead_vllm.engine.worker.step_recorder import StepRecorder
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    learn_last_step,
    random_prompts,
)
from tests.support.models import save_tiny_model
from tests.support.servers import ANSWER_SECONDS, END_SECONDS, running
from tests.support.smollm2 import SMOLLM2

ROOT = Path(__file__).parents[3]
PROMPTS = random_prompts(4, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models"))


def serve_once(
    model: Path, cache: Path, proposer: str = "ngram_trie"
) -> tuple[int, list[list[list[int]]]]:
    """How many drafted nodes were accepted in the life of an engine, and its answers."""
    settings = {
        **{"proposer": proposer, "budget": 8, "max_nodes": 50_000},
        **{"cache_path": str(cache), "cache_interval": 0},
    }
    with engine(model, settings) as llm:
        answers = generate(llm, PROMPTS)
        learn_last_step(llm)
        return drafter_of(llm).counters.accepted_nodes, answers


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("proposer", ["ngram_trie", "hybrid"])
def test_a_second_engine_starts_warm_and_a_damaged_file_is_set_aside(
    model: Path, tmp_path: Path, proposer: str
) -> None:
    cache = tmp_path / "a.cache"
    cold, answers = serve_once(model, cache, proposer)
    assert cache_file.read_header(cache).namespaces == 1

    warm, same_answers = serve_once(model, cache, proposer)
    assert same_answers == answers
    assert warm > cold + 50

    content = bytearray(cache.read_bytes())
    content[len(content) // 2] ^= 1
    cache.write_bytes(content)
    cold_again, same_answers = serve_once(model, cache, proposer)
    assert same_answers == answers and cold_again == cold
    (refused,) = tmp_path.glob("a.cache.refused-*")
    assert refused.read_bytes() == content
    cache_file.load(cache)  # saved anew


def vllm_config(rank: int = 0, **model_config: Any) -> Any:
    settings = dict(
        model="m",
        tokenizer=str(SMOLLM2),
        skip_tokenizer_init=True,
        runner_type="generate",
        tokenizer_mode="auto",
        tokenizer_revision=None,
        trust_remote_code=False,
        get_vocab_size=lambda: 128,
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=rank),
        model_config=SimpleNamespace(**{**settings, **model_config}),
    )


def test_data_parallel_ranks_have_separate_files(tmp_path: Path) -> None:
    options = LookaheadOptions(max_nodes=4096, cache_path=str(tmp_path / "a.cache"))
    for rank in range(2):
        proposer = NGramTrieProposer(options)
        cache = open_cache(vllm_config(rank), options, proposer)
        assert cache is not None
        proposer.start("r", [1])
        proposer.extend({"r": [2, 3, 4]})
        cache.close()
    assert sorted(os.listdir(tmp_path)) == ["a.cache", "a.cache.dp1"]


def test_without_a_path_there_is_no_cache_and_no_tokenizer_is_loaded() -> None:
    options = LookaheadOptions(max_nodes=4096)
    broken = vllm_config(skip_tokenizer_init=False, tokenizer="missing")
    assert open_cache(broken, options, NGramTrieProposer(options)) is None


def test_without_a_tokenizer_the_model_is_the_fingerprint() -> None:
    prints = {
        fingerprint_of(vllm_config(**changes).model_config)
        for changes in ({}, {"model": "n"}, {"get_vocab_size": lambda: 129})
    }
    assert len(prints) == 3


@pytest.mark.model
def test_vllms_tokenizer_has_the_fingerprint_of_transformers() -> None:
    ours = fingerprint_of(vllm_config(skip_tokenizer_init=False).model_config)
    theirs = AutoTokenizer.from_pretrained(SMOLLM2)
    assert ours == cache_file.fingerprint(theirs.get_vocab())


# ---- the end of an engine process ---------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 0, 30])
def test_the_output_task_ends_before_the_engine(timeout: float | None) -> None:
    """Unless requests may be drained; in a thread, as vLLM's server does."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listening = loop.create_task(asyncio.Event().wait())
        client = SimpleNamespace(output_handler=listening)
        end = shutdown._cancelling_output_handler(lambda self, timeout: ended.append(timeout))
        await loop.run_in_executor(None, end, client, timeout)
        await asyncio.sleep(0)
        assert listening.cancelled() == (not timeout)
        listening.cancel()

    ended: list[Any] = []
    asyncio.run(run())
    assert ended == [timeout]
    shutdown._cancelling_output_handler(lambda *_: None)(SimpleNamespace(output_handler=None))


def test_a_client_whose_init_failed_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    end = shutdown._cancelling_output_handler(lambda self, timeout: ended.append(timeout))
    monkeypatch.setattr(AsyncLLM, "shutdown", end)
    client = AsyncLLM.__new__(AsyncLLM)
    del client
    assert ended == [None]


@pytest.mark.parametrize(
    ("drains_for", "asked", "given"), [(0, 0, 20), (0, None, 20), (0, 60, 60), (30, 30, 30)]
)
def test_an_engine_process_has_time_to_save_unless_it_drains_requests(
    drains_for: int, asked: float | None, given: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "15")
    waited: list[float | None] = []
    wrapped = shutdown._with_time_to_end(lambda self, timeout: waited.append(timeout))
    wrapped(SimpleNamespace(_request_shutdown_timeout=drains_for), timeout=asked)
    assert waited == [given]


def test_a_worker_process_has_time_to_save_unless_the_user_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutdown, "_patch_front_end", lambda: None)
    for set_by_user, given in (("", 15), ("40", 40)):
        monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", set_by_user)
        if not set_by_user:
            monkeypatch.delenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS")
        shutdown.allow_time_to_end()
        assert envs.environment_variables["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]() == given
    assert shutdown.seconds_to_save() == given and shutdown.seconds_to_end() > given + 4


def test_evictions_before_a_restart_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Any, options: LookaheadOptions, proposer: NGramTrieProposer) -> None:
        proposer.trie.counters[PRUNED] = 1000

    monkeypatch.setattr(drafter_module, "open_cache", load)
    drafter = LookaheadDrafter.__new__(LookaheadDrafter)
    drafter.options = LookaheadOptions(max_nodes=4096, budget=4)
    drafter.is_drafting_rank, drafter.recorder = True, StepRecorder()
    drafter.begin(SimpleNamespace(), None)
    assert drafter.recorder.take_report().evictions == 0
    drafter.proposer.trie.counters[PRUNED] += 5
    assert drafter.recorder.take_report().evictions == 5


class Workers(MultiprocExecutor):
    """An executor that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        wait = SimpleNamespace(join=lambda timeout: self.told.append("wait"))
        self.workers = [SimpleNamespace(proc=wait)]

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        self.told.append(method)

    def shutdown(self) -> None:
        self.told.append("end")


def core_of(executor: Any, **attributes: Any) -> Any:
    """An engine's core that was asked to end."""
    core = SimpleNamespace(
        model_executor=executor,
        shutdown_state=EngineShutdownState.REQUESTED,
        vllm_config=SimpleNamespace(shutdown_timeout=0),
        scheduler=SimpleNamespace(
            get_num_unfinished_requests=lambda: 1, finish_requests=lambda *_: []
        ),
        _send_abort_outputs=lambda _: None,
        has_work=lambda: False,
        input_queue=Queue(),
    )
    vars(core).update(attributes)
    return core


@pytest.fixture
def _starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_end_with_parent", lambda: None)
    monkeypatch.setattr(shutdown, "_wake_on_signals", lambda _: None)


@pytest.mark.usefixtures("_starts_no_threads")
def test_workers_save_before_the_signal_handlers_are_removed() -> None:
    shutdown.save_before_teardown()
    core = core_of(workers := Workers())
    assert not EngineCoreProc._handle_shutdown(core)
    assert workers.told == ["end", "wait"]


@pytest.mark.usefixtures("_starts_no_threads")
def test_workers_begin_to_save_while_requests_are_drained() -> None:
    """The last of them may take longer than the deadline."""
    shutdown.save_before_teardown()
    core = core_of(workers := Workers(), vllm_config=SimpleNamespace(shutdown_timeout=30))
    core.has_work = lambda: True
    for _ in range(3):
        assert EngineCoreProc._handle_shutdown(core)
    core.has_work = lambda: False
    assert not EngineCoreProc._handle_shutdown(core)
    begin, *end = workers.told
    assert end == ["end", "wait"]
    said = []
    drafter = SimpleNamespace(begin_to_save=lambda: said.append("begin"))
    begin(SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter)))
    assert said == ["begin"]


SLOW_SAVES = """
import os, time
sync = os.fsync
def slow_sync(descriptor):
    time.sleep(3)
    sync(descriptor)
os.fsync = slow_sync
"""


@pytest.mark.parametrize("runner", ["v2"], indirect=True)
@pytest.mark.usefixtures("runner")
def test_a_server_saves_before_its_first_process_ends(llama: Path, tmp_path: Path) -> None:
    """With which a container ends. Ctrl-C in a terminal goes to all processes at a time."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_SAVES)
    cache = tmp_path / "a.cache"
    lookahead = {"method": "lookahead", "budget": 8, "cache_path": str(cache)}
    flags = ("--enforce-eager", "--dtype", "float32", "--attention-backend", "CPU_MLA")
    flags += ("--max-model-len", "256", "--kv-cache-memory-bytes", "64M")
    others = os.environ.get("PYTHONPATH")  # the second runner's stand-ins
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), others]))
    with running(
        llama,
        tmp_path / "log",
        *(*flags, "--speculative-config", json.dumps(lookahead)),
        PYTHONPATH=path,
    ) as (url, process):
        body = {"prompt": PROMPTS[0], "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        assert requests.post(f"{url}/v1/completions", json=body, timeout=ANSWER_SECONDS).ok
        os.killpg(process.pid, signal.SIGINT)
        process.wait(END_SECONDS)
        assert cache_file.count_ngrams(cache_file.load(cache)[0]) > 100


class Saver:
    def __init__(self) -> None:
        self.saved = 0

    def save(self) -> None:
        self.saved += 1


@pytest.mark.usefixtures("_starts_no_threads")
def test_an_engine_saves_once_and_before_its_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver()
    shutdown.before_teardown(saver.save)
    shutdown.before_teardown(Saver().save)  # gone already
    core = core_of(Workers(), has_work=lambda: True)
    core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
    assert EngineCoreProc._handle_shutdown(core)
    assert saver.saved == 0
    core.has_work = lambda: False
    for _ in range(2):
        assert not EngineCoreProc._handle_shutdown(core)
        assert saver.saved == 1
