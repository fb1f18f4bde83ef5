"""With the objective "makespan", requests that will take long get their nodes first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lookahead_vllm.draft.budget import makespan
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.budget.makespan import NUM_LENGTHS, AnswerLengths
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer

SHORT, LONG, NEW = (np.array([token], np.int32) for token in (1, 2, 3))


def answer(lengths: AnswerLengths, prompt: Any, length: int, space: int = 1) -> None:
    lengths.start(0, prompt, space)
    for _ in range(length // 10):
        lengths.add(np.array([0]), np.array([10]))
    lengths.finish(0)


def weights(lengths: AnswerLengths, done: int, space: int = 1) -> list[float]:
    """Of live requests with the three prompts, each with so many tokens."""
    rows = np.arange(1, 4)
    for row, prompt in zip(rows.tolist(), (SHORT, LONG, NEW), strict=True):
        lengths.start(row, prompt, space)
    lengths.add(rows, np.full(3, done))
    found = lengths.weights(rows).tolist()
    for row in rows.tolist():
        lengths.finish(row)
    return found


def test_a_weight_is_the_expected_rest_of_the_answer() -> None:
    lengths = AnswerLengths()
    assert weights(lengths, 20) == [1, 1, 1]
    lengths = AnswerLengths()
    for length in (40, 60):
        answer(lengths, SHORT, length)
        answer(lengths, LONG, 4 * length)
    assert weights(lengths, 0) == pytest.approx([0.4, 1.6, 1])
    lengths = AnswerLengths()
    for length in (40, 60):
        answer(lengths, SHORT, length)
        answer(lengths, LONG, 4 * length)
    # Of the short ones, only that of 60 is left, and 10 tokens; of the long ones 200 - 50.
    assert weights(lengths, 50) == pytest.approx([2 * 10 / 160, 2 * 150 / 160, 1])


def test_an_answer_that_is_longer_than_all_others_is_expected_to_go_on() -> None:
    lengths = AnswerLengths()
    answer(lengths, SHORT, 40)
    answer(lengths, LONG, 200)
    assert weights(lengths, 100) == pytest.approx([1, 1, 1])


def test_namespaces_share_no_lengths() -> None:
    lengths = AnswerLengths()
    answer(lengths, SHORT, 40)
    answer(lengths, LONG, 400)
    answer(lengths, NEW, 400, space=0)
    assert weights(lengths, 0, space=2) == [1, 1, 1]
    assert weights(lengths, 0, space=0) == [1, 1, 1]
    assert weights(lengths, 0)[0] < 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(makespan, "MAX_PROMPTS", 10)
    lengths = AnswerLengths()
    answer(lengths, LONG, 400)
    for i in range(5):
        answer(lengths, SHORT, 40)
        for j in range(5):
            answer(lengths, np.array([10 + i, j], np.int32), 40)
    assert len(lengths._of_prompts) == 10
    assert weights(lengths, 0) == [1, 1, 1]  # SHORT is known, and the long one is forgotten
    for _ in range(NUM_LENGTHS):
        answer(lengths, SHORT, 80)
    assert set(
        lengths._of_prompts[lengths._prompts.get(9, next(reversed(lengths._of_prompts)))]
    ) == {80}


@pytest.mark.parametrize("objective", ["throughput", "makespan"])
def test_the_longer_answer_gets_more_nodes(objective: str) -> None:
    """Both answers repeat themselves, and the step has room for few nodes."""
    options = LookaheadOptions(
        proposer="ngram_trie", max_nodes=1 << 16, num_speculative_tokens=16, objective=objective
    )
    proposer = NGramTrieProposer(options)
    proposer.cost = StepCost(CostCurve([1, 12, 13, 64], [1.0, 1.05, 4.0, 30.0]))
    texts = {"short": [*range(10, 18)] * 4, "long": [*range(20, 28)] * 24}
    nodes = {}
    for _ in range(2):
        for name, text in texts.items():
            proposer.start(name, text[:8])
        for at in range(24):
            proposer.extend({name: [text[at]] for name, text in texts.items()})
            forest = proposer.propose([DraftLimits(name, 16, 16) for name in texts])
        nodes = dict(zip(texts, forest.sizes.tolist(), strict=True))
        for name, text in texts.items():
            proposer.extend({name: text[24:]})
            proposer.finish(name)
    assert 8 <= sum(nodes.values()) <= 10
    assert type(proposer._min_prob) is float  # another type would be compiled for
    if objective == "makespan":
        assert nodes["short"] <= 1 and nodes["long"] >= 7
    else:
        assert nodes["short"] >= 4
