"""A trie counts n-grams, exactly, inside a bound that holds for all tries together."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.trie import (
    DEAD_HEAD,
    FREE_HEAD,
    FRESH,
    HELD,
    NONE,
    OUTPUT,
    PRIVATE,
    PRIVATE_HELD,
    PRIVATE_SHARE,
    Arena,
    Trie,
    find,
)

N = 4


def ids(tokens):
    return np.array(tokens, np.int32)


def ngrams_ending_in(tokens, first=0):
    return Counter(
        tuple(tokens[i - n + 1 : i + 1])
        for i in range(first, len(tokens))
        for n in range(1, min(N, i + 1) + 1)
    )


def held_ngrams(arena, trie):
    """Every n-gram of the trie with its frequency; checks each link on the way."""
    nodes = arena.nodes
    held = {}

    def visit(node, ngram):
        previous, child = NONE, int(nodes[node]["first"])
        while child != NONE:
            token = int(nodes[child]["token"])
            assert nodes[child]["parent"] == node and nodes[child]["prev"] == previous
            assert nodes[child]["kind"] == nodes[node]["kind"]
            assert find(nodes, arena.edges, node, token) == child
            held[(*ngram, token)] = float(nodes[child]["freq"])
            visit(child, (*ngram, token))
            previous, child = child, int(nodes[child]["next"])

    if trie.root != NONE:
        visit(trie.root, ())
    return held


def check(arena, tries):
    """Every slot is in exactly one place: a live trie, a dropped one, the free list, or unused."""
    contents = [held_ngrams(arena, trie) for trie in tries]
    live = sum(len(held) + (trie.root != NONE) for held, trie in zip(contents, tries, strict=True))
    assert live == arena.num_nodes == arena.state[HELD] <= arena.max_nodes
    assert arena.state[PRIVATE_HELD] <= arena.max_nodes * PRIVATE_SHARE + 1
    free, node = 0, arena.state[FREE_HEAD]
    while node != NONE:
        free, node = free + 1, arena.nodes[node]["next"]
    dead, stack = 0, [arena.state[DEAD_HEAD]]
    while stack:
        node = stack.pop()
        if node != NONE:
            dead += 1
            stack += [arena.nodes[node]["next"], arena.nodes[node]["first"]]
    assert live + free + dead == arena.state[FRESH]
    assert (arena.edges != NONE).sum() + sum(t.root != NONE for t in tries) <= live + dead
    return contents


tokens = st.lists(st.integers(0, 3), max_size=12)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 3), tokens),
        st.tuples(st.just("extend"), st.integers(0, 3), tokens),
        st.tuples(st.just("finish"), st.integers(0, 3), st.just([])),
    ),
    max_size=30,
)


def play(arena, actions, after):
    """Interleaved requests, each with a trie of its own and all with one of answers."""
    answers, own, texts, said = Trie(arena, OUTPUT, N), {}, {}, Counter()
    for action, request, new in actions:
        if action in ("start", "finish") and request in own:
            own.pop(request).drop()
        if action == "start":
            own[request], texts[request] = Trie(arena, PRIVATE, N), list(new)
            own[request].insert(ids(new))
        if action == "extend" and request in own:
            tail = texts[request][-(N - 1) :]
            own[request].insert(ids(tail + new), len(tail))
            answers.insert(ids(tail + new), len(tail))
            texts[request] += new
            said += ngrams_ending_in(texts[request], len(texts[request]) - len(new))
        contents = check(arena, [answers, *own.values()])
        after(contents[0], said, list(zip(contents[1:], [texts[r] for r in own], strict=True)))


@settings(deadline=None)
@given(actions)
def test_without_pruning_a_trie_is_a_dict_of_ngrams(actions):
    def after(answers, said, own):
        assert {ngram: n for ngram, n in answers.items() if n} == said
        for held, text in own:
            assert held == ngrams_ending_in(text)

    play(Arena(4096), actions, after)


@settings(deadline=None)
@given(st.integers(8, 120), actions)
def test_pruning_keeps_the_bound_and_every_link_and_never_counts_too_much(max_nodes, actions):
    def after(answers, said, own):
        assert all(n <= said[ngram] for ngram, n in answers.items())
        for held, text in own:
            truth = ngrams_ending_in(text)
            assert all(n <= truth[ngram] for ngram, n in held.items())

    play(Arena(max_nodes), actions, after)


def test_the_newest_token_is_held_at_once():
    trie = Trie(Arena(1024), OUTPUT, N)
    trie.insert(ids([7, 8, 9]))
    trie.insert(ids([7, 8, 9, 5]), 3)
    assert trie.frequency((7, 8, 9, 5)) == trie.frequency((9, 5)) == 1


def test_context_is_matched_but_not_counted():
    trie = Trie(Arena(1024), OUTPUT, N)
    trie.insert(ids([1, 2, 3]), 2)
    assert trie.frequency((1, 2)) == 0 and trie.frequency((1, 2, 3)) == 1


def test_dropping_a_trie_touches_no_other():
    arena = Arena(1024)
    kept, dropped = Trie(arena, PRIVATE, N), Trie(arena, PRIVATE, N)
    kept.insert(ids([1, 2, 3, 1, 2]))
    before = held_ngrams(arena, kept)
    dropped.insert(ids([1, 2, 3, 4]))
    dropped.drop()
    dropped.drop()
    assert held_ngrams(arena, kept) == before and arena.num_nodes == kept.num_nodes


def test_dropped_nodes_are_used_again():
    arena = Arena(1024)
    for start in range(100):
        trie = Trie(arena, PRIVATE, N)
        trie.insert(ids(range(start, start + 100)))
        assert trie.frequency((start + 96, start + 97, start + 98, start + 99)) == 1
        trie.drop()
    assert arena.num_nodes == 0 and arena.num_evicted == 0


def test_pruning_takes_rare_answers_and_never_a_live_prompt():
    arena = Arena(2048)
    prompt, answers = Trie(arena, PRIVATE, N), Trie(arena, OUTPUT, N)
    prompt.insert(ids(range(100)))
    before = held_ngrams(arena, prompt)
    rng = np.random.default_rng(0)
    for _ in range(400):
        answers.insert(ids([1, 2, 3, 4] * 3))
        answers.insert(rng.integers(1000, 9000, 20).astype(np.int32))
        check(arena, [prompt, answers])
    assert arena.num_evicted > 10_000
    assert held_ngrams(arena, prompt) == before
    assert answers.frequency((1, 2, 3, 4)) > 10


def test_one_long_insertion_prunes_around_its_own_cursors():
    arena = Arena(64)
    answers = Trie(arena, OUTPUT, N)
    stream = np.random.default_rng(0).integers(0, 50, 5000).astype(np.int32)
    answers.insert(stream)
    check(arena, [answers])
    assert answers.frequency(tuple(stream[-N:].tolist())) >= 1


def test_when_live_prompts_fill_the_arena_the_newest_text_is_left_out():
    arena = Arena(1024)
    first, second = Trie(arena, PRIVATE, N), Trie(arena, PRIVATE, N)
    first.insert(ids(range(150)))
    before = held_ngrams(arena, first)
    second.insert(ids(range(1000, 3000)))
    third = Trie(arena, PRIVATE, N)
    third.insert(ids([1, 2, 3]))
    assert second.frequency((1000, 1001, 1002, 1003)) == 1
    assert second.frequency((2999,)) == 0 and third.num_nodes == 0
    assert held_ngrams(arena, first) == before
    answers = Trie(arena, OUTPUT, N)
    answers.insert(ids([1, 2, 3]))
    assert answers.frequency((1, 2, 3)) == 1
    check(arena, [first, second, third, answers])


@pytest.mark.parametrize(("vocabulary", "most"), [(1, 10), (50_000, 9 * 32_000 + 1)])
def test_a_prompt_of_32k_tokens_takes_linear_room(vocabulary, most):
    arena = Arena(1_000_000)
    trie = Trie(arena, PRIVATE, 9)
    stream = np.random.default_rng(0).integers(0, vocabulary, 32_000).astype(np.int32)
    trie.insert(stream)
    assert trie.num_nodes <= most
    assert trie.frequency(tuple(stream[-9:].tolist())) >= 1


def test_a_node_takes_less_than_64_bytes():
    arena = Arena(1_000_000)
    assert arena.nodes.nbytes + arena.edges.nbytes < 64 * arena.max_nodes
