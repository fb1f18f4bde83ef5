"""The benchmarks' jobs, in an engine of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engines.generate import Job, run
from tests.support.driving import engine, random_prompts


def test_the_requests_of_a_job_bring_their_references(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            run(job, [[0, 1]], emit)
    assert [[g["token_ids"] for g in turn["generations"]] for turn in turns] == [
        answers[:2],
        answers[2:],
    ]
    without, with_reference = ([g["steps"] for g in turn["generations"]] for turn in turns)
    assert min(without) > 35 and max(with_reference) < 20
