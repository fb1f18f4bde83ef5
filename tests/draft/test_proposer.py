"""The proposer drafts what was said after the same words, and forgets what it must."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.budget import CostCurve
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftRequest, NGramTrieProposer

DOCUMENT = list(range(100, 180))


@pytest.fixture
def proposer():
    return NGramTrieProposer(LookaheadOptions(max_nodes=100_000))


def draft(proposer, request_id, max_nodes=16, max_depth=64, may_branch=True):
    wants = [DraftRequest(request_id, max_nodes, max_depth, may_branch)]
    return proposer.propose(wants)[0]


def children_of_root(tree):
    return set(tree.tokens[tree.parents == -1].tolist())


def teach_copying(proposer):
    """Answers that copy, so that the proposer has learned to believe a match."""
    for first in range(1000, 3000, 50):
        proposer.start("teacher", range(first, first + 40))
        proposer.extend("teacher", range(first, first + 20))
        proposer.finish("teacher")


def test_an_answer_that_copies_a_document_gets_the_chain_that_follows(proposer):
    teach_copying(proposer)
    proposer.start("r", [1, *DOCUMENT, 2])
    proposer.extend("r", DOCUMENT[:4])
    tree = draft(proposer, "r")
    assert tree.is_chain and tree.tokens.tolist() == DOCUMENT[4:20]


def test_a_branch_is_longer_than_the_ngrams_held_and_not_longer_than_wanted(proposer):
    teach_copying(proposer)
    proposer.start("r", [1, *DOCUMENT, 2])
    proposer.extend("r", DOCUMENT[:4])
    assert draft(proposer, "r", max_depth=12).depths.max() == 12


def test_the_newest_tokens_of_an_answer_are_drafted_at_once(proposer):
    proposer.start("r", [1])
    proposer.extend("r", [50, 51, 52, 50, 51])
    assert 52 in children_of_root(draft(proposer, "r"))


def test_another_requests_answer_is_drafted_while_it_is_still_being_written(proposer):
    proposer.start("a", [1])
    proposer.start("b", [2])
    proposer.extend("a", [50, 51, 52])
    proposer.extend("b", [50, 51])
    assert 52 in children_of_root(draft(proposer, "b"))


def test_a_prompt_with_an_end_of_sequence_in_its_middle_is_indexed_whole(proposer):
    eos = 2
    proposer.start("r", [1, 10, 11, 12, eos, 1, 20, 21, 22, eos, 1])
    proposer.extend("r", [20, 21])
    assert 22 in children_of_root(draft(proposer, "r"))
    proposer.extend("r", [22])
    assert eos in children_of_root(draft(proposer, "r"))


def test_a_prompts_branches_go_with_its_request_and_its_answer_stays(proposer):
    proposer.start("a", [60, 61, 62])
    proposer.extend("a", [70, 71, 72])
    proposer.finish("a")
    proposer.start("b", [1])
    proposer.extend("b", [60, 61])
    assert 62 not in draft(proposer, "b").tokens
    proposer.extend("b", [70, 71])
    assert 72 in draft(proposer, "b").tokens


def test_another_live_requests_prompt_is_not_drafted(proposer):
    proposer.start("a", [60, 61, 62])
    proposer.start("b", [60, 61])
    assert len(draft(proposer, "b")) == 0


def test_the_end_of_one_request_does_not_touch_the_drafts_of_another(proposer):
    for request_id in "ab":
        proposer.start(request_id, [*DOCUMENT, 1])
    proposer.extend("b", DOCUMENT[:5])
    before = draft(proposer, "b")
    proposer.finish("a")
    after = draft(proposer, "b")
    assert after.tokens.tolist() == before.tokens.tolist()
    assert after.probs.tolist() == before.probs.tolist()


def test_a_request_that_leaves_the_batch_for_a_while_has_not_ended(proposer):
    proposer.start("preempted", [*DOCUMENT, 1])
    proposer.extend("preempted", DOCUMENT[:3])
    for i in range(50):
        proposer.start(f"other {i}", [3, 4, 5])
        proposer.extend(f"other {i}", [6, 7])
        draft(proposer, f"other {i}")
        proposer.finish(f"other {i}")
    assert draft(proposer, "preempted").tokens[0] == DOCUMENT[3]


def test_pruning_never_takes_a_live_prompt():
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=1024))
    proposer.start("r", [*DOCUMENT[:50], 1])
    proposer.start("flood", [1])
    proposer.extend("flood", np.random.default_rng(0).integers(1000, 40_000, 5000).tolist())
    assert proposer.num_evicted > 0 and proposer.num_nodes <= 1024
    proposer.extend("r", DOCUMENT[:3])
    assert DOCUMENT[3] in draft(proposer, "r").tokens


def test_finishing_an_unknown_request_is_harmless(proposer):
    proposer.finish("never started")


def test_starting_twice_starts_anew(proposer):
    proposer.start("r", [60, 61, 62, 60, 61])
    proposer.start("r", [60, 61])
    assert len(draft(proposer, "r")) == 0


def test_a_request_that_was_not_started_is_an_error(proposer):
    with pytest.raises(KeyError):
        draft(proposer, "unknown")


def test_nothing_is_left_when_every_request_ends_without_an_answer(proposer):
    before = proposer.num_nodes
    for i in range(20):
        proposer.start(f"r{i}", DOCUMENT)
    for i in range(20):
        proposer.finish(f"r{i}")
    assert proposer.num_nodes == before


def test_branches_that_share_a_prefix_share_its_nodes(proposer):
    proposer.start("r", [10, 11, 12, 10, 11, 13, 10, 11, 12, 1])
    proposer.extend("r", [10])
    tree = draft(proposer, "r")
    assert tree.tokens.tolist().count(11) == 1
    eleven = tree.tokens.tolist().index(11)
    assert {12, 13} <= set(tree.tokens[tree.parents == eleven].tolist())
    tree.check(vocab_size=100, max_nodes=16)


def test_what_follows_a_longer_match_comes_first(proposer):
    teach_copying(proposer)
    proposer.start("r", [5, 30, 31, 40, 6, 31, 41, 7, 31, 41, 8])
    proposer.extend("r", [5, 30, 31])
    assert draft(proposer, "r").tokens[0] == 40


def test_where_a_tree_may_not_branch_it_is_a_chain(proposer):
    proposer.start("r", [10, 11, 12, 10, 11, 13, 10, 14, 1])
    proposer.extend("r", [10])
    assert not draft(proposer, "r").is_chain
    assert draft(proposer, "r", may_branch=False).is_chain


def test_no_room_no_draft(proposer):
    proposer.start("r", [10, 11, 10])
    assert len(draft(proposer, "r", max_nodes=0)) == 0
    assert len(draft(proposer, "r", max_depth=0)) == 0


def test_a_fixed_budget_is_not_cut_by_cost():
    steep = CostCurve([1, 2], [1.0, 1000.0])
    sizes = {}
    for budget in ("auto", 3):
        proposer = NGramTrieProposer(LookaheadOptions(budget=budget), steep)
        proposer.start("r", [10, 11, 10, 12, 10, 13, 10, 14, 10])
        sizes[budget] = len(draft(proposer, "r"))
    assert sizes == {"auto": 0, 3: 3}


def test_a_cost_curve_set_later_cuts_the_next_trees(proposer):
    proposer.start("r", [10, 11, 10])
    assert len(draft(proposer, "r")) > 0
    proposer.curve = CostCurve([1, 2], [1.0, 1000.0])
    assert len(draft(proposer, "r")) == 0


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
        proposer.extend(str(request), answer)
    wants = [
        DraftRequest(str(r), max_nodes, max_depth, may_branch) for r in {r for r, _, _ in requests}
    ]
    for tree in proposer.propose(wants):
        tree.check(vocab_size=6, max_nodes=max_nodes)
        assert len(tree) == 0 or tree.depths.max() <= max_depth
        assert (np.diff(tree.probs) <= 0).all() and (tree.probs > 0).all()
        assert (tree.probs < 1).all()
        assert may_branch or tree.is_chain
        for n in range(len(tree)):
            tree.prefix(n).check(vocab_size=6, max_nodes=n)
    assert proposer.num_nodes <= 1024


def test_this_room_needs_no_torch_and_no_vllm():
    code = (
        "import sys, lookahead_vllm.draft.proposer; "
        "assert not {'torch', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
