"""The acceptance rate of evidence is the share of its trials that were hits."""

import numpy as np
import pytest

from lookahead_vllm.draft.growth.acceptance_rate import _sigmoid
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import draft


def answer_in_part(proposer, share, rounds=400):
    """Prompts have `a b`; an answer continues `a` with `b` in this share, else with a new token."""
    rng = np.random.default_rng(0)
    probs = []
    for i in range(rounds):
        a, b, c = 10_000 + 3 * i, 10_001 + 3 * i, 10_002 + 3 * i
        proposer.start("r", [a, b, 1])
        read(proposer, {"r": [a]})
        tree = draft(proposer, max_depth=1)
        held = dict(zip(tree.tokens.tolist(), tree.probs.tolist(), strict=True))
        probs.append(held.get(b, 0.0))
        read(proposer, {"r": [b if rng.random() < share else c]})
        proposer.finish("r")
    return probs


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_probability_is_learned_from_what_was_accepted(share):
    probs = answer_in_part(NGramTrieProposer(LookaheadOptions()), share)
    assert 0.03 < probs[0] < 0.3
    assert np.mean(probs[-100:]) == pytest.approx(share, abs=0.08)


def test_a_changed_rate_is_learned_again():
    proposer = NGramTrieProposer(LookaheadOptions())
    assert np.mean(answer_in_part(proposer, 0.95, 2000)[-100:]) > 0.85
    assert np.mean(answer_in_part(proposer, 0.05, 800)[-100:]) < 0.2


def test_it_learns_from_tokens_that_were_not_drafted():
    proposer = NGramTrieProposer(LookaheadOptions())
    for i in range(100):
        proposer.start("r", [10_000 + 2 * i, 10_001 + 2 * i, 1])
        read(proposer, {"r": [10_000 + 2 * i, 10_001 + 2 * i]})
    proposer.start("r", [5, 6, 7, 5])
    assert draft(proposer, max_nodes=1).probs[0] > 0.8


def test_a_text_that_repeats_itself_does_not_make_other_texts_improbable():
    """Only one in three lines continues as the last one did, after a long loop and without one."""
    rng = np.random.default_rng(0)
    lines = [[*range(100, 110), int(token)] for token in rng.integers(0, 3, 600)]
    probs = []
    for loops in (0, 12_000):
        proposer = NGramTrieProposer(LookaheadOptions(max_nodes=100_000))
        proposer.start("loop", [1])
        for _ in range(loops // 12):
            read(proposer, {"loop": [1, 2, 3, 4, 5] * 12})
        proposer.finish("loop")
        assert np.abs(proposer.rate.weights).max() < 4
        proposer.start("r", [0])
        held = []
        for *line, last in lines:
            read(proposer, {"r": line})
            tree = draft(proposer, max_nodes=8, max_depth=1)
            held.append(dict(zip(tree.tokens.tolist(), tree.probs.tolist(), strict=True)))
            read(proposer, {"r": [last]})
        probs.append(np.mean([step.get(token, 0.0) for step in held[-200:] for token in range(3)]))
    assert probs == pytest.approx([1 / 3, 1 / 3], abs=0.1)


def test_the_sigmoids_polynomial_is_within_a_millionth():
    for log_odds in np.arange(-40, 40, 0.0137, np.float32):
        truth = 1 / (1 + np.exp(-np.float64(log_odds)))
        assert _sigmoid(log_odds) == pytest.approx(truth, rel=0, abs=1e-6)
