"""A new trie starts from the rates that were learned from replayed texts."""

import math

import numpy as np
import pytest

from benchmarks import priors as learning
from benchmarks.priors import save
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.trie import priors
from lookahead_vllm.draft.trie.acceptance_rate import HITS, NUM_RATES, TRIALS, AcceptanceRate
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from tests.support.files import jsonl


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


def test_rates_with_enough_trials_are_saved(tmp_path):
    trials = np.zeros((NUM_RATES, 2), np.float32)
    trials[7] = 30, 40
    trials[9] = 15, priors.TRIALS - 1
    saved = save(trials, tmp_path / "a.npz")
    loaded = priors.load(NUM_RATES, tmp_path / "a.npz")
    assert saved.indices.tolist() == loaded.indices.tolist() == [7]
    assert loaded.shares.tolist() == [0.75]
    rate = AcceptanceRate(loaded)
    assert rate.rates[7] == pytest.approx(math.log(3))
    assert math.isnan(rate.rates[-1])


def test_the_script_learns_what_a_trie_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "PART_TOKENS", 500)
    rng = np.random.default_rng(0)
    phrases = rng.integers(3, 2000, (20, 12))  # the texts repeat themselves
    texts = [[phrases[rng.integers(0, 20, 15)].ravel().tolist() for _ in "ab"] for _ in range(6)]
    lines = ({"prompt_token_ids": a, "output_token_ids": b} for a, b in texts)
    traces, out = jsonl(tmp_path / "a.jsonl", *lines), tmp_path / "priors.npz"
    assert learning.main(["--traces", str(traces), "--out", str(out)]) == 0
    assert len(priors.load(NUM_RATES, out).indices) > 20


def test_priors_of_another_layout_are_refused(tmp_path):
    save(np.full((5, 2), 50, np.float32), tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"5 rates.*delete it and run scripts/learn_priors.py"):
        priors.load(NUM_RATES, tmp_path / "a.npz")
    assert priors.load(NUM_RATES, tmp_path / "none.npz") is None
