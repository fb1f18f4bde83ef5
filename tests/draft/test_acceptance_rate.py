"""Evidence is believed as often as it was right."""

import numpy as np
import pytest

from lookahead_vllm.draft.acceptance_rate import MEMORY, PRIOR_HITS, PRIOR_TRIALS, _record
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftRequest, NGramTrieProposer


def answer_in_part(proposer, share, rounds=400):
    """The prompts say `a b`; after an `a`, that often an answer says `b`, else a new word."""
    rng = np.random.default_rng(0)
    probs = []
    for i in range(rounds):
        a, b, c = 10_000 + 3 * i, 10_001 + 3 * i, 10_002 + 3 * i
        proposer.start("r", [a, b, 1])
        proposer.extend("r", [a])
        tree = proposer.propose([DraftRequest("r", 16, 1)])[0]
        probs.append(float(tree.probs[tree.tokens.tolist().index(b)]))
        proposer.extend("r", [b if rng.random() < share else c])
        proposer.finish("r")
    return probs


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_probability_is_learned_from_what_was_accepted(share):
    probs = answer_in_part(NGramTrieProposer(LookaheadOptions()), share)
    assert probs[0] == pytest.approx(PRIOR_HITS / PRIOR_TRIALS)
    assert np.mean(probs[-100:]) == pytest.approx(share, abs=0.08)


def test_it_learns_from_what_was_not_drafted_too():
    proposer = NGramTrieProposer(LookaheadOptions())
    for i in range(100):
        proposer.start("r", [10_000 + 2 * i, 10_001 + 2 * i, 1])
        proposer.extend("r", [10_000 + 2 * i, 10_001 + 2 * i])
    proposer.start("r", [5, 6, 7, 5])
    assert proposer.propose([DraftRequest("r", 1, 1)])[0].probs[0] > 0.8


def test_old_trials_are_forgotten():
    rates = np.array([[PRIOR_HITS, PRIOR_TRIALS]])
    for hit in [True] * 2_000 + [False] * int(2 * MEMORY):
        _record.py_func(rates, 0, hit)
    assert rates[0, 1] <= MEMORY and rates[0, 0] / rates[0, 1] < 0.15
