"""The cache file keeps what an engine learned."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.draft.trie.table import PRUNED
from lookahead_vllm.engine.drafter import drafter as drafter_module
from lookahead_vllm.engine.drafter.cache import fingerprint_of, open_cache
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.drafter.recorder import StepRecorder
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.driving import drafter_of, engine, generate, learn_last_step, random_prompts
from tests.support.models import save_tiny_model
from tests.support.smollm2 import SMOLLM2

PROMPTS = random_prompts(4, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models"))


def serve_once(model: Path, cache: Path) -> tuple[int, list[list[list[int]]]]:
    """How many drafted nodes were accepted in the life of an engine, and its answers."""
    settings = {
        **{"proposer": "hybrid", "budget": 8, "max_nodes": 50_000, "cache_path": str(cache)},
    }
    with engine(model, settings) as llm:
        answers = generate(llm, PROMPTS)
        learn_last_step(llm)
        return drafter_of(llm).counters.accepted_nodes, answers


def test_a_second_engine_starts_warm_and_a_damaged_file_is_set_aside(model, tmp_path):
    cache = tmp_path / "a.cache"
    cold, answers = serve_once(model, cache)
    assert len(cache_file.read_about(cache).facts["namespaces"]) == 1

    warm, same_answers = serve_once(model, cache)
    assert same_answers == answers
    assert warm > cold + 50

    content = bytearray(cache.read_bytes())
    content[len(content) // 2] ^= 1
    cache.write_bytes(content)
    cold_again, same_answers = serve_once(model, cache)
    assert same_answers == answers and cold_again == cold
    (refused,) = tmp_path.glob("a.cache.refused")
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


def test_data_parallel_ranks_have_separate_files(tmp_path):
    options = LookaheadOptions(max_nodes=4096, cache_path=str(tmp_path / "a.cache"))
    for rank in range(2):
        proposer = NGramTrieProposer(options)
        cache = open_cache(vllm_config(rank), options, proposer)
        assert cache is not None
        proposer.start("r", [1])
        read(proposer, {"r": [2, 3, 4]})
        cache.close()
    assert sorted(os.listdir(tmp_path)) == ["a.cache", "a.cache.dp1"]


def test_without_a_tokenizer_the_model_is_the_fingerprint():
    prints = {
        fingerprint_of(vllm_config(**changes).model_config)
        for changes in ({}, {"model": "n"}, {"get_vocab_size": lambda: 129})
    }
    assert len(prints) == 3


@pytest.mark.model
def test_vllms_tokenizer_has_the_fingerprint_of_transformers():
    ours = fingerprint_of(vllm_config(skip_tokenizer_init=False).model_config)
    theirs = AutoTokenizer.from_pretrained(SMOLLM2)
    assert ours == cache_file.fingerprint(theirs.get_vocab())


def test_evictions_before_a_restart_are_not_counted_again(monkeypatch):
    def load(config: Any, options: LookaheadOptions, proposer: NGramTrieProposer) -> None:
        proposer.trie.counters[PRUNED] = 1000

    monkeypatch.setattr(drafter_module, "open_cache", load)
    drafter = LookaheadDrafter.__new__(LookaheadDrafter)
    drafter.options = LookaheadOptions(max_nodes=4096, budget=4)
    drafter.is_drafting_rank, drafter.recorder = True, StepRecorder()
    drafter._model = SimpleNamespace(max_model_len=64)
    scheduler = SimpleNamespace(max_num_seqs=1)
    drafter.begin(SimpleNamespace(scheduler_config=scheduler, parallel_config=None), None)
    assert drafter.recorder.take_report().evictions == 0
    drafter.proposer.trie.counters[PRUNED] += 5
    assert drafter.recorder.take_report().evictions == 5
