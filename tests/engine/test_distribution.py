"""Unseeded sampling is lossless: several tokens have the joint distribution of plain vLLM."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams, TokensPrompt

from lookahead_vllm.draft.tree import DraftTree
from tests.support.driving import drafter_of, engine
from tests.support.proposers import Planned

PROMPT = [17, 60, 31, 99]
LENGTH = 3
SAMPLING: dict[str, Any] = dict(temperature=0.5, top_k=3, ignore_eos=True, detokenize=False)
SAMPLES = 16_000
P_VALUE_LIMIT = 1e-4
"""A p-value below this fails the test."""


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[tuple[int, ...], float]:
    """The probability of each output of `LENGTH` tokens, from plain vLLM's logprobs."""
    params = SamplingParams(**SAMPLING, max_tokens=1, logprobs=3)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    with engine(llama, logprobs_mode="processed_logprobs") as llm:
        for _ in range(LENGTH):
            prompts = [TokensPrompt(prompt_token_ids=[*PROMPT, *text]) for text in joint]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            joint = {
                (*text, token): p * math.exp(value.logprob)
                for (text, p), output in zip(joint.items(), outputs, strict=True)
                for token, value in output.outputs[0].logprobs[0].items()
                if value.logprob > -math.inf
            }
    assert sum(joint.values()) == pytest.approx(1, abs=1e-5)
    return joint


@pytest.fixture(autouse=True)
def _plan(expected: dict[tuple[int, ...], float]) -> Iterator[None]:
    """Each first token's tree: its two least likely followers, and two nodes below the least."""

    def followers(prefix: tuple[int, ...]) -> list[int]:
        """From the least to the most likely."""
        weights: Counter[int] = Counter()
        for output, p in expected.items():
            if output[: len(prefix)] == prefix:
                weights[output[len(prefix)]] += p
        return [token for token, _ in reversed(weights.most_common())]

    for first in {text[0] for text in expected}:
        least, second, *_ = followers((first,))
        below = followers((first, least))[:2]
        Planned.TREES[first,] = DraftTree.from_lists([least, second, *below], [-1, -1, 0, 0])
    yield
    Planned.TREES.clear()


def sample(llm: LLM) -> Counter[tuple[int, ...]]:
    params = SamplingParams(**SAMPLING, max_tokens=LENGTH + 1, n=100)
    prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * (SAMPLES // 100)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Counter(tuple(o.token_ids[:LENGTH]) for output in outputs for o in output.outputs)


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-squared test: the probability of counts that fit as badly or worse."""
    assert counts.keys() <= expected.keys()
    n = counts.total()
    rare = [text for text, p in expected.items() if p * n < 10]
    cells = [(counts[text], p * n) for text, p in expected.items() if text not in rare]
    if rare:
        cells.append((sum(counts[t] for t in rare), sum(expected[t] for t in rare) * n))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    # Wilson and Hilferty (1931): the cube root of chi-squared is nearly normal.
    k = len(cells) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_the_joint_distribution_is_plain_vllms(llama, expected):
    """A verifier that accepts 2 % of the first nodes unchecked fails this test."""
    with engine(llama, {"proposer": "planned"}, max_num_seqs=128) as llm:
        counts = sample(llm)
        counters = drafter_of(llm).counters
        assert counters.branching_trees > SAMPLES / 2
        assert counters.accepted_nodes > SAMPLES / 20
    assert p_value(counts, expected) >= P_VALUE_LIMIT
