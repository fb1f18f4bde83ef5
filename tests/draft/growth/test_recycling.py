"""The model's choices in a context are found again in that context, the best evidence first."""

import numpy as np

from lookahead_vllm.draft.growth.candidates import CHOSEN, TOKEN, new_candidates
from lookahead_vllm.draft.growth.recycling import (
    NUM_CHOICES,
    ChoiceTrees,
    ModelChoices,
    find_choices,
    find_lines,
    is_from_cell,
    keep_choices,
    make_lines,
    new_replaced,
    swap_lines,
)
from lookahead_vllm.draft.proposers.hybrid import HybridProposer
from lookahead_vllm.draft.proposers.jacobi_window import JacobiWindowProposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.sources import NAMES, OWN, RECYCLED, WINDOW
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.trie.suffix import hashes_of
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import answer, draft
from tests.support.reference_trie import count_edges


def ids(*tokens):
    return np.array(tokens, np.int32)


def choices_from(*first):
    """NUM_CHOICES tokens that begin with these."""
    rest = [90 + i for i in range(NUM_CHOICES)]
    return [*first, *rest][:NUM_CHOICES]


def keep(lines, text, tree, at_root, at_nodes, space=1, num_grown=None):
    forest = DraftForest.of([tree])
    trees = ChoiceTrees(
        ids(space),
        hashes_of(ids(*text))[None],
        forest.tokens,
        forest.parents,
        forest.firsts,
        np.array([len(tree) if num_grown is None else num_grown]),
    )
    choices = ModelChoices(
        np.array([choices_from(99), at_root, *at_nodes], np.int32),
        np.tile(np.arange(NUM_CHOICES, dtype=np.float32), (2 + len(tree), 1)),
        np.array([1]),
    )
    replaced = new_replaced(1 + len(at_nodes))
    replaced = replaced[: find_lines(lines, trees, replaced)]
    keep_choices(lines, trees, choices, replaced)
    return replaced


def find(lines, text, space=1):
    """The longest suffix found, the tokens of the candidates, and their kinds of evidence."""
    evidence = new_candidates().evidence
    longest, size = find_choices(lines, space, hashes_of(ids(*text)), evidence, 0, 8)
    return longest, evidence[TOKEN, :size].tolist(), evidence[CHOSEN, :size].tolist()


def test_choices_come_back_after_the_same_tokens_likeliest_first():
    lines = make_lines(1024)
    tree = DraftTree.from_lists([7, 8], [-1, -1])
    keep(lines, [1, 2, 3], tree, choices_from(7, 50), [choices_from(60), choices_from(61)])
    assert find(lines, [9, 1, 2, 3]) == (3, choices_from(7, 50), find(lines, [1, 2, 3])[2])
    assert find(lines, [5, 3])[:2] == (1, choices_from(7, 50))
    # A node that was not accepted is a context like any other.
    assert find(lines, [2, 3, 8])[:2] == (3, choices_from(61))
    assert find(lines, [4])[:2] == (0, [])


def test_no_choice_crosses_a_space():
    lines = make_lines(1024)
    keep(lines, [1, 2, 3], DraftTree.chain([]), choices_from(7), [], space=5)
    assert find(lines, [1, 2, 3], space=6)[0] == 0
    assert find(lines, [1, 2, 3], space=0)[0] == 0


def test_choices_at_a_cell_are_marked_and_do_not_replace_those_in_a_real_text():
    lines = make_lines(1024)
    keep(lines, [1, 2, 3], DraftTree.chain([]), choices_from(7), [])
    keep(
        lines,
        [9],
        DraftTree.from_lists([8, 3], [-1, 0]),
        choices_from(1),
        [choices_from(2), choices_from(6)],
        num_grown=0,
    )
    _, tokens, kinds = find(lines, [9, 8, 3])
    assert tokens[0] == 6 and is_from_cell(kinds[0])
    _, tokens, kinds = find(lines, [3])
    assert tokens[0] == 7 and not is_from_cell(kinds[0])


def step(proposer, choose):
    """One step of a request whose model chooses `choose(token)` after each token."""
    (tree,) = forest = draft_trees(proposer, [DraftLimits("r", 32, 32)])
    at_root, at_nodes = choose(proposer.last), [choose(token) for token in tree.tokens.tolist()]
    emitted, accepted = answer(tree, at_root, at_nodes)
    verified = Verified.nothing(["r"], forest, NUM_CHOICES)
    for row, token in enumerate([at_root, *at_nodes]):
        verified.tokens[row] = choices_from(token)
    verified.accepted[:] = accepted
    read(proposer, {"r": emitted}, verified)
    proposer.last = emitted[-1]
    return tree, accepted


def test_the_hybrid_tree_has_nodes_of_all_sources():
    options = LookaheadOptions(
        proposer="hybrid", window_size=4, num_speculative_tokens=32, budget=32
    )
    proposer = JacobiWindowProposer(options)
    proposer.start("r", [1, 2, 3])
    read(proposer, {"r": [4]})
    proposer.last = 4
    sources = np.zeros(len(NAMES), int)
    total = 0
    for _ in range(30):  # a text without repeated n-grams: the trie could not help
        tree, accepted = step(proposer, lambda token: (5 * token + 1) % 83)
        sources += np.bincount(tree.sources[accepted], minlength=len(NAMES))
        total += 1 + accepted.sum()
    assert total > 40 and sources[WINDOW] > 0 and sources[RECYCLED] > 0
    assert sources[:4].sum() == 0


def test_a_token_that_no_line_lists_is_not_from_the_choices():
    """The text 5 9 7 8 5 ... 5 8 has a line for 8, but only its sparse suffix, 5 and any token,
    knows 7."""
    options = LookaheadOptions(proposer="hybrid", num_speculative_tokens=32, budget=32)
    proposer = HybridProposer(options)
    proposer.start("r", [5, 9, 7])
    read(proposer, {"r": [8]})
    proposer.last = 8
    for _ in range(3):
        step(proposer, lambda token: 13 - token)
    (tree,) = draft_trees(proposer, [DraftLimits("r", 32, 1)])
    sources = dict(zip(tree.tokens.tolist(), tree.sources.tolist(), strict=True))
    assert sources[7] == OWN and sources[90] == RECYCLED


def test_the_request_that_compiles_the_kernels_leaves_no_edge():
    assert count_edges(HybridProposer(LookaheadOptions(proposer="hybrid")).trie) == 0


def test_what_a_step_has_replaced_can_be_taken_back_and_done_again():
    """The tree repeats its contexts, so that lines are replaced twice."""
    lines, tree = make_lines(64), DraftTree.chain([5, 5, 5, 5])
    keep(lines, [1, 5], DraftTree.chain([7]), choices_from(5), [choices_from(3)])
    before = lines.copy()
    replaced = keep(lines, [2, 5], tree, choices_from(8), [choices_from(i) for i in range(4)])
    after = lines.copy()
    assert len(replaced) > len(set(replaced[:, -2].tolist())) > 3
    for _ in range(2):
        swap_lines(lines, replaced, restore=True)
        assert np.array_equal(lines, before)
        swap_lines(lines, replaced, restore=False)
        assert np.array_equal(lines, after)


def test_rates_are_learned_from_the_choices_before_the_tokens():
    """The tokens are among the choices of their own step, which would look infallible."""

    def rates_after(verified: Verified | None) -> list[np.ndarray]:
        proposer = HybridProposer(LookaheadOptions(max_nodes=1024, window_size=1))
        proposer.start("a", [1, 2, 3])
        draft(proposer, "a", max_nodes=1)
        read(proposer, {"a": [5, 5, 5]}, verified)
        return [array.copy() for array in proposer.rate.arrays]

    tree = DraftForest.of([DraftTree.chain([5, 5])])
    chosen = Verified.nothing(["a"], tree, NUM_CHOICES)
    chosen.tokens[:] = choices_from(5)
    for one, other in zip(rates_after(None), rates_after(chosen), strict=True):
        assert np.array_equal(one, other, equal_nan=True)
