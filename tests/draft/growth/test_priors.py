"""A new trie starts from the rates that were learned from replayed texts."""

import numpy as np
import pytest

from lookahead_vllm.draft.growth import priors
from lookahead_vllm.draft.growth.acceptance_rate import HITS, NUM_RATES, TRIALS, AcceptanceRate
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.options.server import LookaheadOptions


def test_the_packages_priors_are_a_proposers_first_rates():
    learned = priors.load(NUM_RATES)
    rate = NGramTrieProposer(LookaheadOptions()).rate
    assert len(learned.indices) > 1000
    assert priors.PATH.stat().st_size < 10_000
    shares = rate.trials[learned.indices, HITS] / rate.trials[learned.indices, TRIALS]
    np.testing.assert_allclose(shares, learned.shares.clip(0.0005, 0.999), rtol=1e-5)
    assert (rate.trials[learned.indices, TRIALS] == priors.TRIALS).all()
    np.testing.assert_allclose(
        rate.rates[learned.indices], np.log(shares / (1 - shares)), rtol=1e-3
    )
    others = np.setdiff1d(np.arange(NUM_RATES), learned.indices)
    before = AcceptanceRate()
    np.testing.assert_array_equal(rate.rates[others], before.rates[others])
    np.testing.assert_array_equal(rate.weights, before.weights)


def test_priors_of_another_layout_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", num_rates=5, indices=[3], shares=[0.5])
    assert priors.load(5, tmp_path / "a.npz").shares.tolist() == [0.5]
    with pytest.raises(ValueError, match=r"5 rates.*delete it and learn them anew"):
        priors.load(NUM_RATES, tmp_path / "a.npz")
    assert priors.load(NUM_RATES, tmp_path / "none.npz") is None
