"""The proposer drafts what followed the same tokens, and forgets ended requests' texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.budget.cost import CostCurve, Load, StepCost
from lookahead_vllm.draft.growth.acceptance_rate import AcceptanceRate
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import draft, paths
from tests.support.reference_trie import count_edges
from tests.support.valid_trees import check

DOCUMENT = list(range(100, 180))


@pytest.fixture
def proposer():
    return NGramTrieProposer(LookaheadOptions(max_nodes=100_000))


def teach_copying(proposer):
    """Answers that copy, so that the learned acceptance rate of a match is high."""
    for first in range(1000, 3000, 50):
        proposer.start("teacher", range(first, first + 40))
        read(proposer, {"teacher": range(first, first + 20)})
        proposer.finish("teacher")


def test_an_answer_that_copies_a_document_gets_the_chain_that_follows(proposer):
    teach_copying(proposer)
    proposer.start("r", [1, *DOCUMENT, 2])
    read(proposer, {"r": DOCUMENT[:4]})
    tree = draft(proposer, "r")
    assert tree.tokens.tolist() == DOCUMENT[4:20]
    assert tree.depths.tolist() == [*range(1, 17)]


def test_a_prompts_branches_go_with_its_request_and_its_answer_stays(proposer):
    proposer.start("a", [60, 61, 62])
    read(proposer, {"a": [70, 71, 72]})
    proposer.finish("a")
    proposer.start("b", [1])
    read(proposer, {"b": [60, 61]})
    assert 62 not in draft(proposer, "b").tokens
    read(proposer, {"b": [70, 71]})
    assert 72 in draft(proposer, "b").tokens


def test_a_flood_of_answers_leaves_a_live_prompt_alone():
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=16_384))
    proposer.start("r", [*DOCUMENT, 1])
    proposer.start("flood", [1])
    read(proposer, {"flood": np.random.default_rng(0).integers(1000, 40_000, 1400).tolist()})
    assert proposer.trie.num_pruned > 0
    read(proposer, {"r": DOCUMENT[:3]})
    assert DOCUMENT[3] in draft(proposer, "r").tokens


def test_nothing_is_left_when_every_request_ends_without_an_answer(proposer):
    before = count_edges(proposer.trie)
    for i in range(20):
        proposer.start(f"r{i}", DOCUMENT, references=[DOCUMENT[::2]])
    for i in range(20):
        proposer.finish(f"r{i}")
    assert count_edges(proposer.trie) == before


def test_a_fixed_budget_is_not_cut_by_cost():
    steep = CostCurve([1, 2], [1.0, 1000.0])
    sizes = {}
    for budget in ("auto", 3):
        proposer = NGramTrieProposer(LookaheadOptions(budget=budget))
        proposer.cost = StepCost(steep)
        proposer.start("r", [10, 11, 10, 12, 10, 13, 10, 14, 10])
        sizes[budget] = len(draft(proposer, "r"))
    assert sizes == {"auto": 0, 3: 3}


@pytest.mark.parametrize(("waiting", "pays"), [(0.0, True), (0.1, True), (30.0, False)])
def test_sent_nodes_pay_if_they_were_worth_waiting_for(proposer, waiting, pays):
    proposer.cost = StepCost(CostCurve([1, 64], [10, 11]), drafts=waiting)
    proposer.start("r", [5, 6, 7, 8, 9, 5, 6])
    read(proposer, {"r": [7]})
    [tree] = draft_trees(proposer, [DraftLimits("r", 8, 8)], Load(waits=True))
    assert len(tree) and proposer.pays == pays
    draft_trees(proposer, [DraftLimits("r", 0, 0)], Load(waits=True))
    assert not proposer.pays


tokens = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 2), tokens, tokens), min_size=1, max_size=6),
    st.integers(0, 40),
    st.integers(0, 20),
    st.booleans(),
)
def test_every_tree_is_valid_within_its_limits_and_best_first(
    requests, max_nodes, max_depth, may_branch
):
    proposer = NGramTrieProposer(LookaheadOptions(num_speculative_tokens=40, max_nodes=1024))
    for request, prompt, answer in requests:
        proposer.start(str(request), prompt)
        read(proposer, {str(request): answer})
    limits = [
        DraftLimits(str(r), max_nodes, max_depth, may_branch) for r in {r for r, _, _ in requests}
    ]
    for tree in draft_trees(proposer, limits):
        check(tree, vocab_size=6, max_nodes=max_nodes)
        assert len(tree) == 0 or tree.depths.max() <= max_depth
        assert (np.diff(tree.probs) <= 0).all() and (tree.probs > 0).all()
        assert (tree.probs < 1).all()
        forest = DraftForest.of([tree])
        assert may_branch or not forest.branching[0]
        for n in range(len(tree)):
            check(forest.at_most(n)[0], vocab_size=6, max_nodes=n)
    assert count_edges(proposer.trie) <= 1024


def test_a_tree_branches_at_its_root_and_below():
    proposer = NGramTrieProposer(LookaheadOptions())
    proposer.start("r", [10, 11, 12, 10, 11, 13, 10, 14, 15, 10, 14, 16, 1])
    read(proposer, {"r": [10]})
    parents = draft(proposer, "r").parents.tolist()
    assert parents.count(-1) > 1 and any(parents.count(node) > 1 for node in parents if node >= 0)


def test_a_reference_is_drafted_from_its_first_token_and_before_the_prompt():
    proposer = NGramTrieProposer(LookaheadOptions())
    proposer.start("r", [1, 10, 11, 12, 13, 2], references=[[20, 21, 22], [10, 31, 32]])
    assert draft(proposer, "r").tokens[0] in (20, 10)
    read(proposer, {"r": [10]})
    tree = draft(proposer, "r")
    assert tree.tokens[0] == 31 and 11 in tree.tokens


def test_an_answer_that_follows_its_reference_in_spite_of_a_change_is_drafted():
    proposer = NGramTrieProposer(LookaheadOptions())
    proposer.start("r", [1], references=[DOCUMENT])
    read(proposer, {"r": [*DOCUMENT[:20], 7]})
    assert [DOCUMENT[21]] in paths(draft(proposer, "r"))


def test_names_of_namespaces_are_not_kept():
    proposer = NGramTrieProposer(LookaheadOptions())
    proposer.start("r", [1], "a secret salt")
    _, facts = proposer.snapshot()
    assert "salt" not in str(facts) and len(facts["namespaces"]) == 2


def in_slow_motion(proposer):
    """Let each step insert forty turns, however fast the machine is."""
    times = iter(range(10**9))
    queue = proposer.insertion
    queue.clock, queue.seconds, queue.share, queue._left = lambda: next(times), 40, 1000, 40
    return proposer


def test_a_long_prompt_is_inserted_over_several_steps():
    proposer = in_slow_motion(NGramTrieProposer(LookaheadOptions()))
    prompt = np.random.default_rng(0).permutation(30_000)
    proposer.start("r", prompt)
    read(proposer, {"r": prompt[29_900:29_902].tolist()})
    assert prompt[29_902] in draft(proposer, "r").tokens  # the end comes first
    seen = []
    for at in range(100, 139, 3):
        read(proposer, {"r": prompt[at : at + 2].tolist()})
        seen.append(prompt[at + 2] in draft(proposer, "r").tokens)
    assert not seen[0] and seen[-1] and sorted(seen) == seen
    proposer.start("r", prompt)
    proposer.finish("r")
    proposer.start("s", [10, 11, 10])
    for _ in range(2):
        draft(proposer, "s")
    assert 11 in draft(proposer, "s").tokens  # the rest of the text of "r" left the queue with it


def test_a_short_prompt_does_not_wait_for_long_references():
    proposer = in_slow_motion(NGramTrieProposer(LookaheadOptions()))
    for i in range(8):
        proposer.start(f"long-{i}", [1, 2, 3], references=[list(range(5000 * i, 5000 * i + 5000))])
    proposer.start("short", [10, 11, 10])
    for _ in range(3):
        draft(proposer, "short")
    assert proposer.insertion._waiting
    assert 11 in draft(proposer, "short").tokens


def test_a_queued_prompt_is_a_copy():
    proposer = in_slow_motion(NGramTrieProposer(LookaheadOptions()))
    prompt = np.arange(30_000, dtype=np.int32)
    proposer.start("r", prompt)
    prompt[:] = 7  # the engine reuses its buffer
    for _ in range(15):
        draft(proposer, "r")
    read(proposer, {"r": [29_000, 29_001]})
    assert draft(proposer, "r").tokens[0] == 29_002


def test_learned_rates_do_not_depend_on_a_namespace_s_tokens():
    """All namespaces share the rates: texts that differ in token ids alone leave equal rates."""
    rng = np.random.default_rng(2)
    answers = [rng.integers(0, rng.integers(2, 4), 30) for _ in range(12)]
    renamed = rng.permutation(40_000)
    learned = []
    for rename in (np.arange(40_000), renamed):
        proposer = NGramTrieProposer(LookaheadOptions())
        for answer in answers:
            proposer.start("r", rename[answer[:10]].tolist(), "another")
            for token in rename[answer[10:]].tolist():
                read(proposer, {"r": [token]})
            proposer.finish("r")
        assert not proposer.trie.num_pruned  # pruning would depend on which edges share a line
        learned.append(proposer.rate)
    assert learned[0].trials.sum() > AcceptanceRate().trials.sum() + 1000
    for array in ("rates", "trials", "weights"):
        np.testing.assert_array_equal(*(getattr(rate, array) for rate in learned))
