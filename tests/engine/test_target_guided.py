"""A guided model generates the recorded answers, with and without drafts."""

from typing import Any

import numpy as np
import pytest

from benchmarks.engines.generate import Job, run
from benchmarks.engines.target_guided import follow
from lookahead_vllm.engine import plugin
from tests.support import graph_engine
from tests.support.driving import drafter_of, engine, generate, of_length, random_prompts, runner_of


@pytest.mark.parametrize("mode", ["plain", "lookahead", "graphs"])
def test_a_guided_model_generates_the_recorded_answers(mode, llama, monkeypatch):
    monkeypatch.delenv(plugin.PLAIN_V2)  # as in benchmarks
    lookahead = None if mode == "plain" else {"budget": 8, "num_speculative_tokens": 8}
    if mode == "graphs":
        graph_engine.enable(monkeypatch)
    rng = np.random.default_rng(0)
    prompts = random_prompts(5, 30, seed=21)
    # Each answer repeats a phrase, so that there is something to draft.
    phrase = rng.integers(5, 100, 6).tolist()
    answers = [[*rng.integers(5, 100, 3 + i).tolist(), *phrase * 4] for i in range(5)]
    params = [of_length(len(answer)) for answer in answers]
    most = 8 if mode == "graphs" else 3  # the graphs hold the nodes of so many
    with engine(llama, lookahead, max_num_seqs=most, seed=5) as llm:
        follow(llm, prompts, answers)
        assert [output for [output] in generate(llm, prompts, params)] == answers
        if mode == "graphs":
            assert runner_of(llm).num_tails > 10
        other = random_prompts(1, 9, seed=99)
        unguided = generate(llm, other)
        if lookahead:
            assert drafter_of(llm).counters.accepted_nodes > 30
        with pytest.raises(ValueError, match="an answer has the token 4096, but the model knows"):
            follow(llm, prompts[:1], [[4096]])
    with engine(llama, seed=5) as llm:
        assert generate(llm, other) == unguided


def test_the_requests_of_a_job_bring_their_references(llama, monkeypatch):
    """Dictated answers, prefix caching; what differs is whether a request brings a reference."""
    prompts = random_prompts(4, 20, seed=7)
    rng = np.random.default_rng(1)
    answers = [rng.integers(5, 100, 40).tolist() for _ in prompts]
    references = [[*answer[:20], 3, *answer[22:]] for answer in answers]
    turns: list[dict[str, Any]] = []

    def emit(event: str, **content: Any) -> None:
        if event == "answer":
            turns.append(content["answer"])

    with engine(llama, {"budget": 8}, enable_prefix_caching=True) as llm:
        monkeypatch.setattr("vllm.LLM", lambda **_: llm)
        for given in (None, references):
            # Every part has other prompts: the trie learns from the answers.
            half = slice(2) if given is None else slice(2, 4)
            job = Job(
                {"max_num_seqs": 2},
                prompts[half],
                max_tokens=64,
                answers=answers[half],
                references=given and given[half],
            )
            run(job, [{"prompts": [0, 1], "batch_size": 2}], emit)
    assert [[g["token_ids"] for g in turn["generations"]] for turn in turns] == [
        answers[:2],
        answers[2:],
    ]
    without, with_reference = ([g["steps"] for g in turn["generations"]] for turn in turns)
    assert min(without) > 35 and max(with_reference) < 20
