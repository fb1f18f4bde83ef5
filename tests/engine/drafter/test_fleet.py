"""Engines with one `share_with` draft each other's answers; others do not."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead_vllm.draft.fleet import exchange as exchange_module
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.drafter.fleet import fingerprint_of_engine
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.driving import drafter_of, engine, generate, learn_last_step, random_prompts
from tests.support.models import save_tiny_model
from tests.support.redis_server import RedisServer, needs_redis
from tests.support.waiting import wait

PROMPTS = random_prompts(4, 12)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@needs_redis
def test_a_second_engine_drafts_the_answers_of_the_first(server, tmp_path):
    model = save_tiny_model("llama", tmp_path)
    settings = {"proposer": "hybrid", "budget": 8, "max_nodes": 50_000, "share_with": server.url}
    accepted, answers, published = [], [], [0]
    for _ in range(2):
        with engine(model, settings) as llm:
            drafter = drafter_of(llm)
            exchange = drafter._exchange
            assert exchange is not None
            traffic, before = exchange.traffic, published[-1]
            assert wait(lambda traffic=traffic, before=before: traffic.learned >= before)
            answers.append(generate(llm, PROMPTS))
            learn_last_step(llm)
            accepted.append(drafter.counters.accepted_nodes)
        assert exchange.traffic.learned == published[-1]
        published.append(exchange.traffic.published)
    tokens = sum(len(answer) for each in answers[0] for answer in each)
    assert answers[0] == answers[1]
    assert published == [0, tokens, tokens]
    assert accepted[1] > accepted[0] + 50


@needs_redis
def test_no_answer_differs_and_no_step_waits_while_the_server_dies_ten_times(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr(exchange_module, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(exchange_module, "MIN_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr("lookahead_vllm.engine.drafter.fleet.TIMEOUT_SECONDS", 60.0)
    model = save_tiny_model("llama", tmp_path)
    settings = {"proposer": "ngram_trie", "budget": 8, "max_nodes": 50_000}
    with engine(model) as llm:
        plain = generate(llm, PROMPTS)
    stop = threading.Event()

    def kill_and_start() -> None:
        try:
            for _ in range(10):
                time.sleep(0.05)
                server.kill()
                time.sleep(0.05)
                server.start()
        finally:
            stop.set()

    with engine(model, {**settings, "share_with": server.url}) as llm:
        killer = threading.Thread(target=kill_and_start)
        killer.start()
        rounds, slowest = 0, 0.0
        traffic = drafter_of(llm)._exchange.traffic  # type: ignore[union-attr]
        while not stop.is_set() or rounds < 10 or not traffic.published:
            start = time.monotonic()
            assert generate(llm, PROMPTS) == plain
            slowest = max(slowest, time.monotonic() - start)
            rounds += 1
            assert rounds < 1000, "nothing is published"
        killer.join()
    assert slowest < 30  # a step that waited for the server would wait for its timeout


def model_config(**changes: Any) -> Any:
    config = {"hidden_size": 64, "transformers_version": "5", "_name_or_path": "elsewhere"}
    settings = dict(
        model="m",
        served_model_name="m",
        revision=None,
        skip_tokenizer_init=True,
        runner_type="generate",
        get_vocab_size=lambda: 128,
        hf_config=SimpleNamespace(to_dict=lambda: dict(config)),
    )
    return SimpleNamespace(**{**settings, **changes})


def test_only_equal_engines_share():
    def print_of(share: str = "namespace", **changes: Any) -> str:
        return fingerprint_of_engine(model_config(**changes), share)

    other = {"hidden_size": 65}
    newer = {"hidden_size": 64, "transformers_version": "6", "_name_or_path": "here"}
    assert print_of() == print_of(hf_config=SimpleNamespace(to_dict=lambda: newer))
    prints = {
        print_of(),
        print_of("all"),
        print_of(model="n"),
        print_of(served_model_name="n"),
        print_of(revision="n"),
        print_of(get_vocab_size=lambda: 129),
        print_of(hf_config=SimpleNamespace(to_dict=lambda: other)),
    }
    assert len(prints) == 7


def test_only_the_drafting_rank_shares():
    drafter = LookaheadDrafter.__new__(LookaheadDrafter)
    drafter.options = LookaheadOptions(max_nodes=4096, budget=4, share_with="redis://localhost")
    drafter.is_drafting_rank, drafter._exchange = False, None
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))
    drafter._model = SimpleNamespace(max_model_len=64)
    drafter.begin(config, None)  # type: ignore[arg-type]
    assert drafter._exchange is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://:secret@localhost:abc", "its URL is wrong"),
        ("http://:secret@localhost", "its URL is wrong: .*redis://, rediss://, unix://"),
    ],
)
def test_a_wrong_url_is_refused_at_the_start(url, message, tmp_path):
    model = save_tiny_model("llama", tmp_path)
    with (
        pytest.raises(OptionError, match=message) as refused,
        engine(model, {"share_with": url}),
    ):
        pass
    assert "secret" not in str(refused.value)


def test_a_missing_client_is_named_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("lookahead_vllm.engine.config.find_spec", lambda name: None)
    model = save_tiny_model("llama", tmp_path)
    with (
        pytest.raises(OptionError, match=r"install lookahead-vllm\[fleet\]"),
        engine(model, {"share_with": "redis://localhost"}),
    ):
        pass
