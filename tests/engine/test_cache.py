"""What an engine learned outlives it, in a file."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from lookahead_vllm.draft import cache_file
from lookahead_vllm.draft.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.engine import shutdown
from lookahead_vllm.engine.cache import fingerprint_of, open_cache
from tests.engine.driving import drafter_of, engine, generate, random_prompts
from tests.engine.models import save_tiny_model

ROOT = Path(__file__).parents[2]
SMOLLM2 = Path(
    os.environ.get(
        "LOOKAHEAD_TEST_MODEL", str(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    )
)
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
        return drafter_of(llm).counters.accepted_nodes, answers


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


def test_ranks_that_serve_beside_each_other_have_files_of_their_own(tmp_path: Path) -> None:
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


def test_without_a_tokenizer_the_model_tells_files_apart() -> None:
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


@pytest.mark.parametrize(
    ("drains_for", "asked", "given"), [(0, 0, 15), (0, None, 15), (0, 60, 60), (30, 30, 30)]
)
def test_an_engine_process_has_time_to_save_unless_it_has_a_deadline(
    drains_for: int, asked: float | None, given: float
) -> None:
    waited: list[float | None] = []
    wrapped = shutdown._with_time_to_end(lambda self, timeout: waited.append(timeout))
    wrapped(SimpleNamespace(_request_shutdown_timeout=drains_for), timeout=asked)
    assert waited == [given]


class Saver:
    def __init__(self) -> None:
        self.saved = 0

    def save(self) -> None:
        self.saved += 1


def test_an_engine_saves_once_and_before_its_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver()
    shutdown.before_teardown(saver.save)
    shutdown.before_teardown(Saver().save)  # gone already
    core = SimpleNamespace(shutdown_state=EngineShutdownState.SHUTTING_DOWN, has_work=lambda: True)
    assert EngineCoreProc._handle_shutdown(core)
    assert saver.saved == 0
    core.has_work = lambda: False
    for _ in range(2):
        assert not EngineCoreProc._handle_shutdown(core)
        assert saver.saved == 1
