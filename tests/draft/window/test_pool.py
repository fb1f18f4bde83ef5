"""The pool gives the candidates that were added last."""

from lookahead_vllm.draft.sources import OWN, WINDOW
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.draft.window import pool as pool_module
from lookahead_vllm.draft.window.pool import NGramPool


def test_candidates_follow_the_token_and_the_latest_comes_first():
    pool = NGramPool(3, 2)
    pool.add_text([1, 2, 3, 1, 4], OWN)
    pool.add(1, (5, 6), WINDOW)
    assert list(pool.candidates(1)) == [((5, 6), WINDOW), ((2, 3), OWN)]
    assert list(pool.candidates(3)) == [((1, 4), OWN)]
    assert list(pool.candidates(9)) == []


def test_the_candidate_added_longest_ago_is_replaced():
    pool = NGramPool(2, 2)
    for follower in (1, 2, 1, 3):
        pool.add(0, (follower,), OWN)
    assert [rest for rest, _ in pool.candidates(0)] == [(3,), (1,)]


def test_the_oldest_first_tokens_go_when_the_pool_is_full(monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_NGRAMS", 6)
    pool = NGramPool(2, 2)
    for first in range(100):
        for follower in (1, 2, 3, 3):
            pool.add(first, (follower,), OWN)
    held = {first: [rest for rest, _ in pool.candidates(first)] for first in range(100)}
    assert {first for first, found in held.items() if found} == {97, 98, 99}
    assert held[97] == [(3,), (2,)]


def test_a_text_shorter_than_an_n_gram_has_none():
    pool = NGramPool(5, 2)
    pool.add_text([1, 2, 3, 4], OWN)
    assert not list(pool.candidates(1))


def test_no_n_gram_reaches_across_what_has_no_token_id():
    pool = NGramPool(2, 2)
    pool.add_text([1, 2, UNKNOWN, UNKNOWN, 3, 4], OWN)
    found = {first: [rest for rest, _ in pool.candidates(first)] for first in (1, 2, UNKNOWN, 3)}
    assert found == {1: [(2,)], 2: [], UNKNOWN: [], 3: [(4,)]}
