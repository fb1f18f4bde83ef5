"""The rows of a step are sampled in chunks of bounded memory, and a step has a bounded number."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.engine.drafter import drafter
from lookahead_vllm.engine.runner import dummy_runs
from lookahead_vllm.engine.step import sampler
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    grown_forests,
    of_length,
    random_prompts,
    record_plain,
    runner_of,
)
from tests.support.logprobs import answers_with_logprobs, assert_same_logprobs
from tests.support.proposers import record

HIDDEN = {"proposer": "hidden_path", "budget": 16}
PROMPTS = random_prompts(8, 30, seed=41)
PARAMS = [
    of_length(40, logprobs=2),
    of_length(40, temperature=0.8, seed=3, top_p=0.9, logprobs=1),
    of_length(40, temperature=0.7, seed=4, repetition_penalty=1.2),
    of_length(40, presence_penalty=0.5, bad_words=[]),
] * 2


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 20))
def test_chunks_hold_all_rows_in_order(sizes, most):
    ends = np.append(0, np.cumsum(sizes)).astype(np.int32)
    chunks = sampler.chunks_of(ends, most)
    rows = [row for chunk in chunks for row in range(len(sizes))[chunk.requests]]
    assert rows == list(range(len(sizes)))
    for requests, own in chunks:
        assert (own.start, own.stop) == (ends[requests.start], ends[requests.stop])
        assert own.stop - own.start <= most or requests.stop - requests.start == 1


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_chunks_give_the_same_answers(mode, llama, monkeypatch):
    rows: list[int] = []
    original = sampler.NodeSampler._verify

    def verify(self: Any, step: Any, logits: Any, batch: Any, chunk: Any, *args: Any) -> Any:
        rows.append(chunk.rows.stop - chunk.rows.start)
        return original(self, step, logits, batch, chunk, *args)

    monkeypatch.setattr(sampler.NodeSampler, "_verify", verify)
    with engine(llama, logprobs_mode=mode) as plain:
        vanilla = answers_with_logprobs(plain, PROMPTS, PARAMS)
    record(PROMPTS, [[tokens] for tokens, *_ in vanilla])
    monkeypatch.setattr(sampler, "MAX_CHUNK_BYTES", 40 * 4 * 128)
    with engine(llama, HIDDEN, logprobs_mode=mode) as llm:
        assert_same_logprobs(answers_with_logprobs(llm, PROMPTS, PARAMS), vanilla)
        assert drafter_of(llm).counters.moved_tokens > 20
    assert max(rows) <= 40 and len(rows) > 20


def test_a_step_has_no_more_nodes_than_its_logits_may_have(llama, monkeypatch):
    vanilla = record_plain(llama, PROMPTS, PARAMS)
    monkeypatch.setattr(drafter, "MAX_LOGITS_BYTES", 50 * 4 * 128)
    with engine(llama, HIDDEN) as llm:
        assert drafter_of(llm).max_step_nodes == 50
        forests = grown_forests(llm)
        assert generate(llm, PROMPTS, PARAMS) == vanilla
    assert 40 < max(forest.num_nodes for forest in forests) <= 50


def test_vllm_counts_the_logits_of_the_largest_step_on_a_gpu(llama, monkeypatch):
    with engine(llama, HIDDEN) as llm:
        runner, rows = runner_of(llm), []
        original = runner.model.compute_logits

        def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden_states))
            return original(hidden_states)

        monkeypatch.setattr(runner.model, "compute_logits", compute_logits)
        drafter_of(llm).max_step_nodes = 100
        hidden_states = torch.zeros(4, runner.model_config.get_hidden_size())
        runner._dummy_sampler_run(hidden_states)
        assert rows == [4]
        monkeypatch.setattr(dummy_runs, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        runner._dummy_sampler_run(hidden_states)
        assert rows == [4, 4, 104]
