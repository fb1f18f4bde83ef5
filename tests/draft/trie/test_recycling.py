"""What the model said at a context is found again there, the best evidence first."""

import numpy as np

from lookahead_vllm.draft.hybrid import HybridProposer
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits, RequestOverrides, Verified
from lookahead_vllm.draft.sources import NAMES, RECYCLED, WINDOW
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.trie.candidates import CHOSEN, TOKEN, candidate_scratch
from lookahead_vllm.draft.trie.recycling import (
    NUM_CHOICES,
    find_choices,
    is_from_cell,
    make_lines,
    recycle,
)
from lookahead_vllm.draft.trie.suffix import row_of


def ids(*tokens):
    return np.array(tokens, np.int32)


def said(*first):
    """Choices that begin with these tokens."""
    rest = [90 + i for i in range(NUM_CHOICES)]
    return [*first, *rest][:NUM_CHOICES]


def keep(lines, text, tree, at_root, at_nodes, space=1, grown=None):
    forest = DraftForest.of([tree])
    recycle(
        lines,
        ids(space),
        row_of(ids(*text))[None],
        forest.tokens,
        forest.parents,
        forest.firsts,
        np.array([len(tree) if grown is None else grown]),
        ids(*at_root)[None],
        np.array(at_nodes, np.int32).reshape(-1, NUM_CHOICES),
        np.tile(np.arange(NUM_CHOICES, dtype=np.float32), (1 + len(tree), 1)),
    )


def find(lines, text, space=1, most=8):
    found, _, _ = candidate_scratch()
    longest, size = find_choices(lines, space, row_of(ids(*text)), found, 0, most)
    return longest, found[:size, TOKEN].tolist(), found[:size, CHOSEN].tolist()


def test_choices_come_back_after_the_same_tokens_likeliest_first():
    lines = make_lines(1024)
    tree = DraftTree.from_lists([7, 8], [-1, -1])
    keep(lines, [1, 2, 3], tree, said(7, 50), [said(60), said(61)])
    assert find(lines, [9, 1, 2, 3]) == (3, said(7, 50), find(lines, [1, 2, 3])[2])
    assert find(lines, [5, 3])[:2] == (1, said(7, 50))
    # A node that was not accepted is a context like any other.
    assert find(lines, [2, 3, 8])[:2] == (3, said(61))
    assert find(lines, [4])[:2] == (0, [])


def test_what_was_said_last_counts_and_the_longer_suffix_comes_first():
    lines = make_lines(1024)
    none = DraftTree.chain([])
    keep(lines, [1, 2, 3], none, said(7), [])
    keep(lines, [4, 5, 3], none, said(8), [])
    longest, tokens, _ = find(lines, [1, 2, 3], most=12)
    assert longest == 3 and tokens[0] == 7 and 8 in tokens
    assert find(lines, [3])[1][0] == 8


def test_no_choice_crosses_a_space():
    lines = make_lines(1024)
    keep(lines, [1, 2, 3], DraftTree.chain([]), said(7), [], space=5)
    assert find(lines, [1, 2, 3], space=6)[0] == 0
    assert find(lines, [1, 2, 3], space=0)[0] == 0


def test_a_cell_of_a_window_is_told_from_a_real_text_and_does_not_replace_it():
    lines = make_lines(1024)
    keep(lines, [1, 2, 3], DraftTree.chain([]), said(7), [])
    keep(lines, [9], DraftTree.from_lists([8, 3], [-1, 0]), said(1), [said(2), said(6)], grown=0)
    _, tokens, kinds = find(lines, [9, 8, 3])
    assert tokens[0] == 6 and is_from_cell(kinds[0])
    _, tokens, kinds = find(lines, [3])
    assert tokens[0] == 7 and not is_from_cell(kinds[0])


def step(proposer, request_id, choose, max_nodes=32):
    """One step of a request whose model says `choose(token)` after each token."""
    (tree,) = forest = DraftForest.of(
        proposer.propose([DraftLimits(request_id, max_nodes, max_nodes)])
    )
    root = proposer.last
    accepted = np.zeros(len(tree), np.bool_)
    here, emitted = -1, [choose(root)]
    for node in range(len(tree)):
        if tree.parents[node] == here and tree.tokens[node] == emitted[-1]:
            accepted[node] = True
            here = node
            emitted.append(choose(emitted[-1]))
    proposer.extend({request_id: emitted})
    proposer.observe(
        Verified(
            [request_id],
            forest,
            ids(*said(choose(root)))[None],
            np.array([said(choose(t)) for t in tree.tokens.tolist()], np.int32).reshape(
                -1, NUM_CHOICES
            ),
            np.zeros((1 + len(tree), NUM_CHOICES), np.float32),
            accepted,
            np.array([accepted.sum()]),
        )
    )
    proposer.last = emitted[-1]
    return tree, accepted


def test_the_hybrid_tree_draws_on_all_sources():
    options = LookaheadOptions(
        proposer="hybrid", window_size=4, ngram_size=3, num_speculative_tokens=32, budget=32,
        sources="none",
    )  # fmt: skip
    proposer = HybridProposer(options)
    proposer.start("r", [1, 2, 3])
    proposer.extend({"r": [4]})
    proposer.last = 4
    sources = np.zeros(len(NAMES), int)
    total = 0
    for _ in range(30):  # a text that never says a thing twice in a row: the trie could not help
        tree, accepted = step(proposer, "r", lambda token: (5 * token + 1) % 83)
        sources += np.bincount(tree.sources[accepted], minlength=len(NAMES))
        total += 1 + accepted.sum()
    assert total > 40 and sources[WINDOW] > 0 and sources[RECYCLED] > 0
    assert sources[:4].sum() == 0


def test_a_request_may_wish_for_the_trie_alone():
    options = LookaheadOptions(proposer="hybrid", num_speculative_tokens=32, budget=32)
    proposer = HybridProposer(options)
    proposer.start("r", [1, 2, 3, 1, 2], overrides=RequestOverrides(proposer="ngram_trie"))
    proposer.extend({"r": [3]})
    proposer.last = 3
    for _ in range(5):
        tree, _ = step(proposer, "r", lambda token: token % 3 + 1)
        assert set(tree.sources.tolist()) <= {0, 1}


def test_what_compiles_its_kernels_is_learned_by_nobody():
    assert HybridProposer(LookaheadOptions(proposer="hybrid")).trie.count_edges() == 0
