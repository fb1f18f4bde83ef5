"""Each step equals that of the paper's algorithms, and the output equals plain vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from lookahead_vllm.engine.worker.drafter import LookaheadDrafter
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    generate_staggered,
    learn_last_step,
    random_prompts,
)
from tests.support.lookahead_decoding import tokens_by_step

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
SEEDED = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True, detokenize=False)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
PROMPTS = random_prompts(2, 30, vocab=12, seed=3)  # a small vocabulary repeats n-grams

SHAPES: list[dict[str, Any]] = [
    dict(window_size=5, ngram_size=4, guess_set_size=2),
    dict(window_size=5, ngram_size=4, guess_set_size=5, pool_from_prompt=True),
    dict(window_size=7, ngram_size=2, guess_set_size=3),
    dict(window_size=1, ngram_size=5, guess_set_size=7, pool_from_prompt=True),
    dict(window_size=4, ngram_size=3, guess_set_size=4),
]


def reference(
    llm: LLM, prompt: list[int], answer: list[int], options: dict[str, Any]
) -> list[list[int]]:
    """The tokens of each step, by the reference implementation over plain vLLM."""

    def choose(texts: list[list[int]]) -> list[int]:
        return [tokens[0] for (tokens,) in generate(llm, texts, ONE)] if texts else []

    return tokens_by_step(prompt, answer, choose, **options)


def test_every_step_equals_that_of_the_papers_algorithms(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: dict[tuple[int, str], list[list[list[int]]]] = {}
    with engine(llama, max_num_seqs=64) as plain:
        vanilla = {
            name: generate(plain, PROMPTS, params)
            for name, params in (("greedy", GREEDY), ("seeded", SEEDED))
        }
        for i, options in enumerate(SHAPES):
            for name, answers in vanilla.items():
                expected[i, name] = [
                    reference(plain, prompt, answer, options)
                    for prompt, (answer,) in zip(PROMPTS, answers, strict=True)
                ]
    assert sum(len(b) < 24 for steps in expected.values() for b in steps) > len(SHAPES)

    emitted: dict[str, list[list[int]]] = {}
    original = LookaheadDrafter.learn

    def learn(self: LookaheadDrafter, bursts: dict[str, list[int]], *args: Any) -> None:
        for request_id, burst in bursts.items():
            emitted.setdefault(request_id, []).append(burst)
        original(self, bursts, *args)

    monkeypatch.setattr(LookaheadDrafter, "learn", learn)
    for i, options in enumerate(SHAPES):
        lookahead = {
            "proposer": "jacobi_window",
            "num_speculative_tokens": 64,
            "budget": 64,
            **options,
        }
        with engine(llama, lookahead) as llm:
            for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
                emitted.clear()
                assert generate(llm, PROMPTS, params) == vanilla[name]
                learn_last_step(llm)
                assert list(emitted.values()) == expected[i, name], (options, name)


@pytest.mark.parametrize("proposer", ["jacobi_window", "hybrid"])
def test_output_equals_plain_vllm_whatever_a_request_chooses(proposer: str, llama: Path) -> None:
    prompts = random_prompts(12, 40, vocab=20, seed=9)
    chosen: list[dict[str, Any]] = [{}, {"enabled": False}]
    if proposer == "hybrid":
        chosen += [{"proposer": "ngram_trie"}, {"proposer": "jacobi_window"}]
    params = [
        SamplingParams(
            temperature=0.8 if i % 2 else 0,
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            detokenize=False,
            extra_args={"lookahead": chosen[i % len(chosen)]},
        )
        for i in range(12)
    ]
    plain_params = [p.clone() for p in params]
    for p in plain_params:
        p.extra_args = None
    with engine(llama) as plain:
        vanilla = generate(plain, prompts, plain_params)
        staggered = generate_staggered(plain, prompts, GREEDY)
    with engine(llama, {"proposer": proposer, "window_size": 4, "budget": 40,
                        "num_speculative_tokens": 40}) as llm:  # fmt: skip
        assert generate(llm, prompts, params) == vanilla
        assert generate_staggered(llm, prompts, GREEDY) == staggered
        counters = drafter_of(llm).counters
        assert counters.accepted_nodes > 50 and counters.branching_trees > 50
        assert counters.refused_trees == 0
        generate(llm, prompts[:1])  # the worker drops finished requests in the next step
        windows = drafter_of(llm).proposer.branch.windows  # type: ignore[attr-defined]
        assert len(windows.request_rows._rows) == 1, "a window outlived its request"
