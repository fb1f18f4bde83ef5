"""If there are too many namespaces, those with the fewest n-grams are forgotten."""

import numpy as np
import pytest

from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.draft.trie import namespaces as module
from lookahead_vllm.draft.trie.namespaces import Namespaces
from lookahead_vllm.draft.trie.suffix import empty_hashes
from lookahead_vllm.draft.trie.table import Trie, count_by_space
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import draft


@pytest.fixture(autouse=True)
def _few_namespaces(monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMESPACES", 8)


def test_names_that_were_used_once_replace_no_namespace_in_use():
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=100_000))

    def answer(namespace, tokens):
        proposer.start("r", [1], namespace)
        read(proposer, {"r": tokens})
        proposer.finish("r")

    answer("idle", list(range(50, 90)))
    for i in range(100):
        answer(f"made up {i}", [5, 6])
    proposer.start("r", [1], "idle")
    read(proposer, {"r": [60, 61]})
    assert 62 in draft(proposer).tokens
    assert len(proposer.snapshot()[1]["namespaces"]) <= 8


def test_the_space_of_a_live_request_is_not_forgotten():
    trie = Trie(1024)
    namespaces = Namespaces(trie)
    first = namespaces.space_of("first", set)
    for i in range(30):
        namespaces.space_of(str(i), lambda: {first})
    assert namespaces.space_of("first", set) == first


def test_edges_are_counted_by_space():
    trie = Trie(4096)
    spaces = np.array([trie.new_shared() for _ in range(5)])
    own = trie.new_private(100)
    rng = np.random.default_rng(0)
    for space, length in ((spaces[0], 20), (spaces[3], 3), (own, 30)):
        trie.insert(space, empty_hashes(), rng.integers(0, 50, length).astype(np.int32))
    held = (trie.edges[:, 0] & 0xFFFFFFFF).astype(np.uint32).astype(np.int64)
    expected = [(held == space).sum() for space in spaces]
    assert expected[0] > expected[3] > 0 == expected[1]
    assert count_by_space(trie.edges, spaces).tolist() == expected
    assert count_by_space(trie.edges, spaces[::-1]).tolist() == expected[::-1]
