"""The trie counts what followed which suffix, separately in every space, within its capacity."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.draft.trie.suffix import (
    NUM_SUFFIXES,
    PROMPT_END,
    WHOLE,
    empty_hashes,
    hashes_of,
)
from lookahead_vllm.draft.trie.table import (
    CLOCK,
    CLOCK_TICKS,
    HALF_LIFE_TICKS,
    LAST_PRIVATE,
    LAST_SHARED,
    LIVE_BONUS,
    MAX_LIVE_SPACES,
    MAX_SPACE,
    NO_SPACE,
    SLOTS_PER_LINE,
    Trie,
)
from tests.support.reference_trie import SUFFIXES, TrieModel, context, count_edges, found_after


def ids(tokens):
    return np.array(tokens, np.int32)


def insert(trie, space, tokens):
    trie.insert(space, empty_hashes(), ids(tokens))


def followers(trie, space, text):
    """By suffix, what followed the end of `text`."""
    return {suffix: found_after(trie, space, hashes_of(ids(text)), suffix) for suffix in SUFFIXES}


@pytest.mark.parametrize("prompt", [range(20), range(1000, 1000 + PROMPT_END)])
def test_the_hashes_of_a_prompt_depend_on_its_end_alone(prompt):
    hashes = empty_hashes()
    Trie(4096).insert(NO_SPACE, hashes, ids(prompt))
    longer = [*range(5), *prompt]
    expected = hashes if len(prompt) == PROMPT_END else hashes_of(ids(longer))
    assert hashes_of(ids(longer)).tolist() == expected.tolist()
    same = [suffix for suffix in SUFFIXES if suffix != WHOLE]
    trie = Trie(4096)
    space = trie.new_shared()
    trie.insert(space, hashes.copy(), ids([7]))
    held = followers(trie, space, longer)
    assert all(held[suffix] == [(7, 1)] for suffix in same)
    assert held[WHOLE] == ([(7, 1)] if len(prompt) == PROMPT_END else [])


def test_the_whole_answer_tells_equal_ends_apart():
    """Two answers to one prompt, and the same answer to prompts that end alike."""
    trie = Trie(1 << 16)
    space = trie.new_shared()
    template, loop = list(range(100, 120)), [1, 2] * 20
    for question, token in ((5, 7), (6, 8)):
        hashes = hashes_of(ids([question, *template]))
        trie.insert(space, hashes, ids([*loop, token]))
    for question, token in ((5, 7), (6, 8)):
        hashes = hashes_of(ids([question, *template]))
        trie.insert(NO_SPACE, hashes, ids(loop))
        assert found_after(trie, space, hashes, WHOLE) == [(token, 1)]
        assert len(found_after(trie, space, hashes, WHOLE - 1)) > 1


def test_a_requests_own_text_has_no_edges_of_the_whole_answer():
    trie = Trie(4096)
    space = trie.new_private(20)
    trie.insert(space, empty_hashes(), ids(range(10)), with_whole=False)
    assert count_edges(trie) == 10 * (NUM_SUFFIXES - 1)


def test_no_n_gram_reaches_across_what_has_no_token_id():
    text = [7, 8, UNKNOWN, UNKNOWN, 9, 10]
    trie, apart = Trie(4096), Trie(4096)
    space = trie.new_shared()
    hashes = empty_hashes()
    trie.insert(space, hashes, ids(text))
    assert hashes.tolist() == hashes_of(ids(text)).tolist() == hashes_of(ids([9, 10])).tolist()
    assert hashes_of(ids(text[:4])).tolist() == empty_hashes().tolist()
    for part in ([7, 8], [9, 10]):
        insert(apart, space, part)
    assert trie.edges.tolist() == apart.edges.tolist()


def test_a_suffix_keeps_the_frequent_and_the_new():
    trie = Trie(1 << 16)
    space = trie.new_shared()
    for token in [1, 1, *range(10, 40)]:
        insert(trie, space, [9, token])
    held = dict(followers(trie, space, [9])[0])
    assert len(held) == SLOTS_PER_LINE and held[1] == 2 and held[39] == 1


def test_of_the_equally_frequent_the_oldest_goes():
    trie = Trie(1 << 16)
    space = trie.new_shared()
    for token in range(SLOTS_PER_LINE + 1):
        insert(trie, space, [99, token])
        trie.counters[CLOCK] += (1 << 16) // CLOCK_TICKS  # a tick of the clock
    held = {token for token, _ in followers(trie, space, [99])[0]}
    assert held == set(range(1, SLOTS_PER_LINE + 1))


streams = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), max_size=10)), max_size=12
)


@settings(deadline=None, derandomize=True)  # in one of some thousand texts, two lines meet
@given(streams)
def test_without_pruning_it_is_a_dict_of_suffixes(streams):
    trie, model, texts = Trie(1 << 24), TrieModel(), {}
    spaces = [trie.new_shared(), trie.new_private(1 << 20), trie.new_private(1 << 20)]
    for which, tokens in streams:
        text = texts.setdefault(which, [])
        trie.insert(spaces[which], hashes_of(ids(text)), ids(tokens))
        for token in tokens:
            model.insert(which, text, token)
            text.append(token)
    for which, text in texts.items():
        for end in range(len(text) + 1):
            for other in range(3):
                found = followers(trie, spaces[other], text[:end])
                for suffix, held in found.items():
                    assert held == model.followers(other, text[:end], suffix), (which, suffix)


@settings(deadline=None)
@given(st.integers(8, 200), streams)
def test_pruning_keeps_the_bound_and_never_counts_too_much(max_nodes, streams):
    trie, truth, texts = Trie(max_nodes), Counter(), {}
    spaces = [trie.new_shared(), trie.new_private(10), trie.new_private(10)]
    for which, tokens in streams:
        text = texts.setdefault(which, [])
        trie.insert(spaces[which], hashes_of(ids(text)), ids(tokens))
        for token in tokens:
            truth.update((which, context(text, suffix), token) for suffix in SUFFIXES)
            text.append(token)
    assert count_edges(trie) <= max_nodes
    for which, text in texts.items():
        for end in range(len(text) + 1):
            for suffix, held in followers(trie, spaces[which], text[:end]).items():
                assert len({token for token, _ in held}) == len(held)
                for token, count in held:
                    assert 1 <= count <= truth[which, context(text[:end], suffix), token]


def test_nothing_is_found_in_another_space_nor_after_the_end_of_its_own():
    trie = Trie(1 << 16)
    shared, first, second = trie.new_shared(), trie.new_private(20), trie.new_private(20)
    insert(trie, first, [1, 2, 3])
    assert followers(trie, first, [1, 2])[0] == [(3, 1)]
    for space in (shared, second):
        assert not any(followers(trie, space, [1, 2]).values())
    insert(trie, second, [1, 2, 4])
    trie.eliminate(first)
    assert count_edges(trie) == 3 * NUM_SUFFIXES
    assert followers(trie, second, [1, 2])[0] == [(4, 1)]
    trie.eliminate(first)
    trie.eliminate(shared)
    assert count_edges(trie) == 3 * NUM_SUFFIXES


def test_no_space_has_no_edge():
    trie = Trie(1024)
    insert(trie, NO_SPACE, [1, 2, 3])
    assert count_edges(trie) == 0
    assert not any(followers(trie, NO_SPACE, [1, 2]).values())


def flood(trie, space, num_tokens):
    insert(trie, space, np.random.default_rng(0).integers(1000, 40_000, num_tokens))


@pytest.mark.parametrize("is_live", [False, True])
def test_eliminated_text_is_the_first_to_go(is_live):
    trie = Trie(8192)
    answers, private = trie.new_shared(), trie.new_private(1000)
    flood(trie, private, 1000)
    if not is_live:
        trie.eliminate(private)
    before = trie.num_pruned
    insert(trie, answers, range(100))
    pruned = trie.num_pruned - before
    assert pruned > 100 * NUM_SUFFIXES / 4 if is_live else pruned == 0


def test_a_live_prompt_outlasts_rare_answers_and_frequent_answers_outlast_it():
    trie = Trie(8192)
    answers, prompt = trie.new_shared(), trie.new_private(100)
    insert(trie, prompt, range(100))
    for _ in range(3 * LIVE_BONUS):
        insert(trie, answers, range(500, 520))
    flood(trie, answers, 700)
    kept = [followers(trie, prompt, [token])[0] == [(token + 1, 1)] for token in range(98)]
    assert np.mean(kept) > 0.95
    often = [followers(trie, answers, [token])[0] for token in range(500, 519)]
    assert all(held and held[0][0] == token + 501 for token, held in enumerate(often))
    assert trie.num_pruned > 500


def test_a_frequency_that_is_not_refreshed_fades():
    trie = Trie(1 << 12)
    space, other = trie.new_shared(), trie.new_shared()
    for _ in range(40):
        insert(trie, space, [1, 2])
    trie.counters[CLOCK] += (
        2 * HALF_LIFE_TICKS * (4096 // CLOCK_TICKS)
    )  # as if so many edges had been made
    insert(trie, space, [1, 2])
    assert followers(trie, space, [1])[0] == [(2, 11)]
    insert(trie, other, [1, 3])
    assert followers(trie, other, [1])[0] == [(3, 1)]


def test_the_newest_text_is_always_found():
    trie = Trie(4096)
    space = trie.new_shared()
    stream = np.random.default_rng(0).integers(0, 40_000, 20_000)
    insert(trie, space, stream)
    assert trie.num_pruned > 100_000
    newest = [followers(trie, space, stream[: -i - 1])[3] for i in range(200)]
    assert np.mean([held == [(stream[-i - 1], 1)] for i, held in enumerate(newest)]) > 0.9


def test_a_short_text_keeps_to_a_small_part_of_the_table():
    trie = Trie(1 << 20)
    space = trie.new_private(50)
    insert(trie, space, range(50))
    used = np.flatnonzero(trie.edges[:, 0])
    assert used.max() - used.min() < 1 << 14


def test_answers_keep_a_quarter_of_the_table_whatever_is_live():
    trie = Trie(1 << 16)
    space = trie.new_shared()
    insert(trie, space, range(6000))
    last = trie.edges[-len(trie.edges) // 4 :].copy()
    assert np.count_nonzero(last[:, 0]) > 10_000
    rng = np.random.default_rng(0)
    for _ in range(40):
        insert(trie, trie.new_private(4000), rng.integers(10_000, 50_000, 4000))
    assert trie.num_pruned > 400_000
    np.testing.assert_array_equal(trie.edges[-len(last) :], last)


@pytest.mark.parametrize("vocabulary", [1, 50_000])
def test_a_prompt_of_32k_tokens_takes_linear_work(vocabulary):
    trie = Trie(1 << 20)
    space = trie.new_private(32_000)
    stream = np.random.default_rng(0).integers(0, vocabulary, 32_000)
    insert(trie, space, stream)
    assert trie.counters[CLOCK] <= 32_000 * NUM_SUFFIXES
    assert followers(trie, space, stream[:-1])[4][0][0] == stream[-1]


def test_the_numbers_of_private_spaces_wrap_around():
    trie = Trie(1024)
    trie.counters[LAST_PRIVATE] = 2**31 - 3
    held = [trie.new_private(1) for _ in range(4)]
    assert held == [-(2**31 - 2), -(2**31 - 1), -1, -2]


def test_the_numbers_of_shared_spaces_end():
    trie = Trie(1024)
    trie.counters[LAST_SHARED] = MAX_SPACE - 1
    assert [trie.new_shared() for _ in range(3)] == [MAX_SPACE, NO_SPACE, NO_SPACE]


def test_live_private_spaces_are_limited():
    trie = Trie(1024)
    held = [trie.new_private(1) for _ in range(MAX_LIVE_SPACES)]
    assert len(set(held)) == MAX_LIVE_SPACES and trie.new_private(1) == NO_SPACE
    trie.eliminate(held[5])
    assert trie.new_private(1) != NO_SPACE


def test_a_node_takes_16_bytes_and_a_line_of_4_is_one_cache_line():
    trie = Trie(1_000_003)
    assert trie.edges.nbytes == 16_000_000
    assert trie.edges.ctypes.data % 64 == 0
