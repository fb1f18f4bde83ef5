"""The hybrid proposer asks for the model's choices while they pay, and is the trie while not."""

import math
from types import SimpleNamespace

import numpy as np

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.growth.candidates import CHOICES
from lookahead_vllm.draft.growth.recycling import NUM_CHOICES
from lookahead_vllm.draft.proposers import hybrid
from lookahead_vllm.draft.proposers.hybrid import HybridProposer
from lookahead_vllm.draft.proposers.jacobi_window import JacobiWindowProposer
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import answer

OPTIONS = LookaheadOptions(proposer="hybrid", max_nodes=8192)
LIMITS = [DraftLimits("a", 64, 32)]
CYCLE = 50
"""The model's text: 1000, 1001, ..., again and again; the request's own is never inserted."""


def next_token(token: int) -> int:
    return 1000 + (token - 1000 + 1) % CYCLE


def step(proposer: HybridProposer, token: int) -> int:
    """One step of a model that continues the cycle; returns the last emitted token."""
    (tree,) = forest = draft_trees(proposer, LIMITS)
    at_nodes = [next_token(drafted) for drafted in tree.tokens.tolist()]
    emitted, accepted = answer(tree, next_token(token), at_nodes)
    verified = None
    if proposer.num_choices:
        verified = Verified.nothing(["a"], forest, NUM_CHOICES)
        ranks = np.arange(NUM_CHOICES, dtype=np.int32)
        best = np.array([next_token(token), *at_nodes], np.int32)
        verified.tokens[:] = best[:, None] + 100 * ranks
        verified.gaps[:] = 2.0 * ranks
        verified.accepted[:] = accepted
    read(proposer, {"a": emitted}, verified)
    return emitted[-1]


def proposer_where_a_token_costs(cost: float) -> HybridProposer:
    proposer = JacobiWindowProposer(OPTIONS)  # so nothing comes from the trie
    proposer.cost = StepCost(CostCurve([1, 2, 128], [1.0, 1.0 + cost, 1.0 + 127 * cost]))
    proposer.start("a", [1000])
    return proposer


def steps_with_choices(proposer: HybridProposer, num_steps: int) -> int:
    token, count = 1000, 0
    for _ in range(num_steps):
        count += proposer.num_choices > 0
        token = step(proposer, token)
    return count


def test_choices_that_are_accepted_stay():
    proposer = proposer_where_a_token_costs(0.001)
    assert steps_with_choices(proposer, 300) == 300
    assert proposer.worth > 1


def test_where_no_node_pays_nothing_is_asked_for():
    proposer = proposer_where_a_token_costs(10.0)
    assert 50 < steps_with_choices(proposer, 300) < 100
    assert proposer.num_choices == 0


def test_they_are_tried_again(monkeypatch):
    monkeypatch.setattr(hybrid, "RETRY_STEPS", 100)
    proposer = proposer_where_a_token_costs(10.0)
    steps_with_choices(proposer, 120)
    proposer.cost = StepCost(CostCurve([1, 128], [1.0, 1.1]))
    steps_with_choices(proposer, 120)
    assert steps_with_choices(proposer, 300) == 300


def test_a_fixed_budget_always_has_them():
    proposer = HybridProposer(LookaheadOptions(proposer="hybrid", budget=8, max_nodes=8192))
    proposer.start("a", [1000])
    assert steps_with_choices(proposer, 300) == 300


def test_without_choices_it_is_the_trie(monkeypatch):
    for cls in (NGramTrieProposer, HybridProposer):  # nothing is learned before the first request
        monkeypatch.setattr(cls, "_compile", lambda _: None)
    without, trie = HybridProposer(OPTIONS), NGramTrieProposer(OPTIONS)
    without._use_choices(False)
    # Anything else of the branch raises.
    monkeypatch.setattr(
        without, "branch", SimpleNamespace(start=lambda *_: None, finish=lambda _: None)
    )
    lines = without._lines.copy()
    text = np.random.default_rng(0).integers(0, 4, 400).tolist()
    for proposer in (without, trie):
        proposer.insertion.seconds = math.inf
    without.start("a", text)
    trie.start("a", text)
    for token in text[:100]:
        grown = [draft_trees(proposer, LIMITS)[0] for proposer in (without, trie)]
        np.testing.assert_array_equal(grown[0].tokens, grown[1].tokens)
        np.testing.assert_array_equal(grown[0].parents, grown[1].parents)
        observed = Verified.nothing(["a"], DraftForest.of([DraftTree.chain([token])]), NUM_CHOICES)
        read(without, {"a": [token]}, observed)  # asked for before
        read(trie, {"a": [token]})
    np.testing.assert_array_equal(without._lines, lines)


def test_a_request_that_starts_meanwhile_has_choices_later():
    proposer = HybridProposer(OPTIONS)
    proposer._use_choices(False)
    proposer.start("a", [1, 2, 3])
    row = proposer._texts.request_rows.rows_of(["a"])
    assert not proposer._texts.spaces[row, CHOICES].any()
    proposer._use_choices(True)
    assert proposer._texts.spaces[row, CHOICES].all()
