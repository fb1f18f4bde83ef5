"""A trained drafter's chain in the trees of the trie."""

from collections.abc import Sequence

import numpy as np

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.progress import NUM_ALTERNATIVES, PROPOSED, no_chains
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.draft.sources import DRAFTER, OWN
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.options.server import CHAIN_LENGTH, LookaheadOptions
from tests.support.drafting import draft, paths

LENGTH = 3
NODES = 16


def make() -> NGramTrieProposer:
    return NGramTrieProposer(
        LookaheadOptions(
            max_nodes=1 << 16,
            num_speculative_tokens=NODES,
            budget=NODES,
            drafter={CHAIN_LENGTH: LENGTH},
        )
    )


def chain(*tokens: int, gap: int = 3) -> Int32s:
    """A chain of these tokens; the alternatives to token n are n + 100, n + 200 and n + 300."""
    made = no_chains(LENGTH, 1)
    for place, token in enumerate(tokens):
        made[0, place, :, PROPOSED] = token + 100 * np.arange(NUM_ALTERNATIVES)
        made[0, place, :, 1] = gap
    return made


def follow(
    proposer: NGramTrieProposer, *tokens: int, gap: int = 3, emitted: Sequence[int] = ()
) -> None:
    """The request has `emitted` tokens, after which the drafter proposes this chain."""
    read(proposer, {"r": emitted}, chains=chain(*tokens, gap=gap))


def test_a_tree_holds_the_chain_and_the_alternatives_beside_it():
    proposer = make()
    proposer.start("r", [1, 2])
    follow(proposer, 5, 6, 7)
    tree = draft(proposer)
    found = paths(tree)
    assert found[:3] == [[5], [5, 6], [5, 6, 7]]
    assert [105] in found and [5, 106] in found and [5, 6, 107] in found
    assert not [path for path in found if len(path) > 1 and path[0] == 105]  # nothing follows
    assert set(tree.sources.tolist()) == {DRAFTER}


def test_the_trie_goes_on_behind_the_chain_and_finds_the_chain_from_a_branch():
    proposer = make()
    proposer.start("r", [5, 6, 7, 8, 9, 1, 2])
    follow(proposer, 5, 6, 7)
    tree = draft(proposer)
    found = paths(tree)
    at = found.index([5, 6, 7, 8, 9])
    assert tree.sources[at] == OWN
    assert tree.sources[found.index([5, 6])] == OWN  # both have proposed it


def test_a_chain_ends_with_the_next_one():
    proposer = make()
    proposer.start("r", [1, 2], namespace=None)
    follow(proposer, 5, 6, 7)
    follow(proposer, 30, emitted=[5])
    assert [path for path in paths(draft(proposer)) if 6 in path] == []
    follow(proposer)
    assert UNKNOWN not in draft(proposer).tokens and not len(draft(proposer))
    proposer.finish("r")
    proposer.start("r", [1, 2], namespace=None)
    assert not len(draft(proposer))


def test_rates_are_learned_by_depth_rank_and_gap():
    """The chain is right with a large gap; with a small one, the first alternative is."""
    proposer = make()
    proposer.start("r", [1, 2], namespace=None)
    rng = np.random.default_rng(0)
    for step in range(300):
        one, two = rng.integers(1000, 100_000, 2).tolist()
        is_sure = step % 2 == 0
        follow(proposer, one, two, gap=3 if is_sure else 0)
        read(proposer, {"r": [one, two + 100 * (step % 4 == 0)] if is_sure else [one + 100]})
    follow(proposer, 5, 6, 7, gap=3)
    sure = draft(proposer)
    follow(proposer, 5, 6, 7, gap=0)
    unsure = draft(proposer)
    prob = dict(zip(map(tuple, paths(sure)), sure.probs.tolist(), strict=True))
    other = dict(zip(map(tuple, paths(unsure)), unsure.probs.tolist(), strict=True))
    assert prob[5,] > 0.85 and 0.3 < prob[5, 6] < 0.7 and prob.get((105,), 0) < 0.1
    assert other[105,] > 0.8 and other.get((5,), 0) < 0.1
