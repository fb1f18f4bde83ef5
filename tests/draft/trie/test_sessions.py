"""The text of a conversation stays in the trie for its next turn, and for nobody else."""

import math

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from lookahead_vllm.draft.insertion import CHUNK_TOKENS, InsertionQueue
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.draft.trie import sessions as module
from lookahead_vllm.draft.trie import table
from lookahead_vllm.draft.trie.sessions import MAX_CHANGED_TOKENS, Session, Sessions
from lookahead_vllm.draft.trie.suffix import WHOLE, hashes_of
from lookahead_vllm.draft.trie.table import (
    MIN_REGION_LINES,
    SLOTS_PER_LINE,
    SLOTS_PER_TOKEN,
    Trie,
)
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import check_all_were_seen, draft, seen_in
from tests.support.kernels import compiled, compiled_since, reset_kernels
from tests.support.reference_trie import SUFFIXES, TrieModel, count_edges, found_after

TEMPLATE_END = 2
"""MAX_GENERATION_PROMPT of `_short`."""


def ids(tokens):
    return np.array(tokens, np.int32)


def text_of(seed, length):
    """A text that repeats parts of itself."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 40_000, length // 2 + 1)
    while len(text) < length:
        start = rng.integers(0, len(text))
        text = np.append(text, text[start : start + 30])
    return ids(text[:length])


def sessions_in(text_nodes=1 << 23, at_once=True):
    queue = InsertionQueue()
    queue.seconds = queue._left = math.inf if at_once else 0.0
    trie = Trie(1024, text_nodes)
    trie._has_page[:] = True  # so each turn inserts
    return Sessions(trie, queue), queue


@pytest.fixture
def _large(monkeypatch):
    """Spaces are so large that no line is ever full."""
    monkeypatch.setattr(table, "SLOTS_PER_TOKEN", 500)


def held(session, text):
    """What followed each prefix of a text, by suffix, in no order."""
    trie, space = session.trie, session.space
    assert not trie.num_pruned
    hashes = [hashes_of(text[:end]) for end in range(len(text) + 1)]
    return [{s: set(found_after(trie, space, of, s)) for s in SUFFIXES} for of in hashes]


def expected(text):
    """The same of a space that holds this text alone."""
    model, tokens = TrieModel(), text.tolist()
    for end, token in enumerate(tokens):
        model.insert(0, tokens[:end], token)
    return [
        {s: set(model.followers(0, tokens[:end], s)) if s != WHOLE else set() for s in SUFFIXES}
        for end in range(len(tokens) + 1)
    ]


@pytest.fixture
def _short(monkeypatch):
    """Short texts are kept, too."""
    for name in ("MIN_TOKENS", "BLOCK_TOKENS"):
        monkeypatch.setattr(module, name, 2)
    monkeypatch.setattr(module, "MAX_CHANGED_TOKENS", 3)
    monkeypatch.setattr(module, "MAX_GENERATION_PROMPT", TEMPLATE_END)


# What is inserted.


@pytest.mark.parametrize("vocabulary", [2, 3, 1000])
def test_newest_first_leaves_what_oldest_first_leaves(vocabulary):
    """Frequencies, and which token followed last."""
    text = ids(np.random.default_rng(0).integers(0, vocabulary, 300))
    trie = Trie(1024, 1 << 24)
    forward, backward = trie.new_private(100_000), trie.new_private(100_000)
    trie.insert(forward, hashes_of(text[:0]), text, with_whole=False)
    for start in range(240, -1, -60):
        trie.insert_before(backward, text, start, start + 60)
    assert not trie.num_pruned
    for end in range(301):
        hashes = hashes_of(text[:end])
        for suffix in SUFFIXES:
            ways = [found_after(trie, space, hashes, suffix) for space in (forward, backward)]
            assert ways[0] == ways[1]


@pytest.mark.usefixtures("_large")
def test_the_end_of_a_prompt_is_there_before_its_beginning():
    sessions, queue = sessions_in(at_once=False)
    text = text_of(0, 10 * CHUNK_TOKENS)
    session = sessions.open("a", text)
    there = []
    while session.pending:
        queue.end_step()  # one turn
        there.append(session.pending[0][1] if session.pending else 0)
    assert there == list(range(9 * CHUNK_TOKENS, -1, -CHUNK_TOKENS))
    assert held(session, text) == expected(text)


# Turns of a conversation.


def turn(sessions, queue, prompt, answer=(), digest="a"):
    """A request whose answer is inserted as a step does, and which ends."""
    session = sessions.open(digest, ids(prompt))
    queue.work()
    hashes = hashes_of(session.tokens)
    session.trie.insert(session.space, hashes, ids(answer), with_whole=False)
    sessions.close(session, ids(answer))
    return session


@pytest.mark.usefixtures("_large")
def test_the_next_turn_inserts_only_what_is_new():
    sessions, queue = sessions_in()
    first, answer, news = text_of(1, 600), text_of(2, 50), text_of(3, 70)
    session = turn(sessions, queue, first, answer)
    whole = np.concatenate((first, answer, news))
    queue.seconds = 0.0
    assert sessions.open("a", whole) is session
    assert session.pending == [(650, 720)]
    queue.seconds = math.inf
    queue.work()
    assert held(session, whole) == expected(whole)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("kept", [40, 0, -10, -MAX_CHANGED_TOKENS])
def test_what_the_next_turn_lacks_is_taken_back(kept):
    """A template may strip a part of the answer, or the end of the prompt before it."""
    sessions, queue = sessions_in()
    first, answer, news = text_of(1, 600), text_of(2, 50), text_of(3, 70)
    session = turn(sessions, queue, first, answer)
    whole = np.concatenate((np.concatenate((first, answer))[: 600 + kept], news))
    assert sessions.open("a", whole) is session
    queue.work()
    assert held(session, whole) == expected(whole)
    gone = np.concatenate((first, answer))
    for at in range(max(600, 600 + kept) + 16, 650):
        assert not found_after(session.trie, session.space, hashes_of(gone[:at]), WHOLE - 1)


@pytest.mark.usefixtures("_large")
def test_a_turn_that_leaves_more_of_the_prompt_is_another_text():
    sessions, queue = sessions_in()
    first = text_of(1, 600)
    session = turn(sessions, queue, first, text_of(2, 50))
    other = np.concatenate((first[: 600 - MAX_CHANGED_TOKENS - 1], text_of(3, 200)))
    branch = turn(sessions, queue, other)
    assert branch is not session
    assert held(branch, other) == expected(other)
    assert sessions.open("a", first) is session


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("num_turns", [0, 3, 8])
def test_what_was_not_inserted_is_not_taken_back(num_turns):
    """However far the queue was, the text that follows is there once."""
    sessions, queue = sessions_in(at_once=False)
    first = text_of(1, 8 * CHUNK_TOKENS)
    session = turn(sessions, queue, first, text_of(2, 20))
    for _ in range(num_turns):
        queue.end_step()
    whole = np.concatenate((first[:-30], text_of(3, 90)))
    assert sessions.open("a", whole) is session
    queue.seconds = math.inf
    queue.work()
    assert held(session, whole) == expected(whole)


@pytest.mark.usefixtures("_large")
def test_equal_prompts_share_a_space_and_leave_no_answer_but_the_last():
    sessions, queue = sessions_in()
    prompt = text_of(1, 600)
    live = [sessions.open("a", prompt) for _ in range(3)]
    assert live[0] is live[1] is live[2]
    queue.work()
    assert sessions.open("a", np.append(prompt, 5).astype(np.int32)) is not live[0]
    session, answers = live[0], [text_of(i, 40) for i in range(10, 13)]
    for answer in answers:
        session.trie.insert(session.space, hashes_of(prompt), answer, with_whole=False)
    for answer in answers:
        sessions.close(session, answer)
    whole = np.concatenate((prompt, answers[-1]))
    assert held(session, whole) == expected(whole)


def test_another_namespace_and_short_or_unshared_texts_find_nothing():
    sessions, queue = sessions_in()
    prompt = text_of(1, 600)
    session = turn(sessions, queue, prompt)
    for digest in ("b", None):
        other = sessions.open(digest, prompt)
        assert other is not session
        sessions.close(other, ids([]))
    queue.work()
    before = count_edges(session.trie)
    turn(sessions, queue, prompt, digest=None)
    turn(sessions, queue, prompt[:100])
    assert count_edges(session.trie) == before


def test_a_long_answer_is_not_kept():
    sessions, _ = sessions_in()
    for answer in (None, np.zeros(module.MAX_ANSWER_TOKENS + 1, np.int32)):
        session = sessions.open("a", text_of(1, 600))
        sessions.close(session, answer)
        assert not session.trie.is_live(session.space)


# Spellings.


def counts(trie, space):
    """How often each edge of a space was counted."""
    own = table.spaces_of(trie.edges) == space
    uses = trie.edges[own, table.USE]
    times = uses >> table.COUNT_SHIFT & table.MAX_UINT16
    return times.tolist()


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("at_once", [True, False])
def test_a_spelling_is_inserted_once_in_all_turns(at_once):
    """If the client sends the turn again, too."""
    sessions, queue = sessions_in(at_once=at_once)
    prompt, news, texts = text_of(1, 600), text_of(2, 30), [text_of(3, 200), text_of(4, 90)]
    for turns in ([prompt, [texts[0]]], [np.concatenate((prompt, news)), [texts[1]]]):
        for _ in range(2):
            session = sessions.open("a", turns[0], spellings=turns[1])
            for _ in range(2):
                queue.end_step()
            sessions.close(session, ids([]))
    queue.seconds = math.inf
    queue.work()
    trie = Trie(1024, 1 << 23)
    space = trie.new_private(1000)
    for text in (np.concatenate((prompt, news)), *texts):
        trie.insert(space, hashes_of(text[:0]), text, with_whole=False)
    assert sorted(counts(session.trie, session.space)) == sorted(counts(trie, space))


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("num_turns", [0, 10, 11, 99])
@pytest.mark.parametrize(
    ("changed", "has_its_end", "is_kept"),
    [
        (module.MAX_GENERATION_PROMPT, True, True),
        (module.MAX_GENERATION_PROMPT, False, False),
        (1, False, False),
        (module.MAX_GENERATION_PROMPT + 1, True, False),
        (MAX_CHANGED_TOKENS, False, False),
    ],
)
def test_a_spelling_goes_with_its_text(changed, has_its_end, is_kept, num_turns):
    """However far the queue was, unless only the template's end changes its place."""
    sessions, queue = sessions_in(at_once=False)
    prompt, spelled = text_of(1, 600), [ids(np.random.default_rng(0).permutation(40_000)[:200])]
    session = sessions.open("a", prompt, spellings=spelled)
    for _ in range(num_turns):
        queue.end_step()
    sessions.close(session, ids([]))
    end = prompt[-changed:] if has_its_end else prompt[:0]
    whole = np.concatenate((prompt[:-changed], text_of(2, 90), end))
    assert sessions.open("a", whole) is session
    queue.seconds = math.inf
    queue.work()
    if not is_kept:
        assert held(session, whole) == expected(whole)
    else:
        for text in spelled:
            found = found_after(session.trie, session.space, hashes_of(text[:80]), 1)
            assert len(found) == 1


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_spelling_whose_end_was_moved_goes_with_that_end(goes_on):
    """The text may stand before the end's old place no more, but before its new one."""
    sessions, queue = sessions_in()
    prompt, end = text_of(1, 600), text_of(2, module.MAX_GENERATION_PROMPT)
    spelling = ids(np.random.default_rng(0).permutation(40_000)[:200])
    second = np.concatenate((prompt, text_of(3, 40), end))
    third = np.concatenate((second if goes_on else second[:-1], text_of(4, 90)))
    for text, spelled in ((np.concatenate((prompt, end)), [spelling]), (second, []), (third, [])):
        session = sessions.open("a", text, spellings=spelled)
        queue.work()
        sessions.close(session, ids([]))
    assert bool(found_after(session.trie, session.space, hashes_of(spelling[:80]), 1)) == goes_on


# The bound.


@pytest.mark.parametrize(("num_turns", "is_taken_over"), [(0, True), (20, True), (99, False)])
def test_a_session_is_not_taken_over_if_too_much_were_taken_back_at_once(num_turns, is_taken_over):
    """Of spellings, what is inserted counts; nothing is taken back if the text goes on."""
    sessions, queue = sessions_in(at_once=False)
    prompt, spelled = text_of(1, 600), [text_of(i, 1500) for i in range(3)]
    session = sessions.open("a", prompt, spellings=spelled)
    for _ in range(num_turns):
        queue.end_step()
    sessions.close(session, ids([]))
    assert (sessions.open("a", prompt[:-20]) is session) == is_taken_over
    assert session.trie.is_live(session.space)
    if not is_taken_over:
        assert sessions.open("a", np.concatenate((prompt, text_of(9, 50)))) is session


def test_long_spellings_of_a_short_prompt_take_no_room_of_others():
    """A prompt that was cut may come with tool results that it does not hold."""
    sessions, queue = sessions_in(text_nodes=1 << 18)
    kept = [turn(sessions, queue, text_of(i, 600)) for i in range(3)]
    session = sessions.open("a", text_of(9, 600), spellings=[text_of(10, 60_000)])
    assert session.room == 2 * (2 * 600 + module.EXPECTED_ANSWER_TOKENS)
    assert not session.spellings
    assert all(one.trie.is_live(one.space) for one in kept)


def test_a_prompt_that_comes_again_with_other_spellings_keeps_those_for_which_there_is_room():
    sessions, _ = sessions_in(text_nodes=1 << 22)
    prompt = text_of(1, 600)
    for i in range(100):
        session = sessions.open("a", prompt, spellings=[text_of(2 + i, 200)])
        sessions.close(session, ids([]))
    kept = sum(len(one.tokens) for one in session.spellings)
    assert session.room - 200 < kept <= session.room < 100 * 200


def test_the_least_recently_used_go_and_the_others_are_whole():
    room = module.EXPECTED_ANSWER_TOKENS + 600
    sessions, queue = sessions_in(text_nodes=5 * room * 18 + 100)
    prompts = [text_of(i, 600) for i in range(8)]
    kept = [turn(sessions, queue, prompt) for prompt in prompts[:5]]
    assert turn(sessions, queue, prompts[0]) is kept[0]
    kept += [turn(sessions, queue, prompt) for prompt in prompts[5:7]]
    is_live = [one.trie.is_live(one.space) for one in kept]
    assert is_live == [True, False, False, True, True, True, True]
    num_all, num_held = sessions.sample(1000)
    assert num_held > 0.99 * num_all == 0.99 * 1000


def test_what_is_kept_stays_within_the_bound_over_many_sessions():
    """Of 200 sessions with three turns, which come in any order."""
    sessions, queue = sessions_in(text_nodes=1 << 19)
    trie, size = sessions._trie, sessions._trie.num_bytes
    rng = np.random.default_rng(0)
    texts = [ids(rng.integers(0, 40_000, rng.integers(520, 3000))) for _ in range(200)]
    for i in rng.permutation(np.repeat(np.arange(200), 3)):
        texts[i] = np.concatenate((texts[i], ids(rng.integers(0, 40_000, 70))))
        session = sessions.open("a", texts[i], spellings=[texts[i][-70:]])
        queue.work()
        sessions.close(session, texts[i][:50])
        kept = [*sessions._all.values()]
        num_tokens = sum(
            len(one.tokens) + sum(len(spelling.tokens) for spelling in one.spellings)
            for one in kept
        )
        assert num_tokens * SLOTS_PER_TOKEN <= 1 << 19
        assert len(kept) == np.count_nonzero(trie.live[:-1, 0]) == len(sessions._idle)
        assert sum(map(len, sessions._by_key.values())) == len(kept)
    assert trie.num_bytes == size and len(kept) >= 5


def test_live_texts_do_not_go_and_may_share_their_room():
    sessions, _ = sessions_in(text_nodes=2 * MIN_REGION_LINES * SLOTS_PER_LINE)
    live = [sessions.open("a", text_of(i, 600)) for i in range(4)]
    assert all(one.trie.is_live(one.space) for one in live)


def test_the_sample_sees_what_is_missing():
    sessions, queue = sessions_in(at_once=False)
    text = np.random.default_rng(0).integers(0, 40_000, 100 * CHUNK_TOKENS)
    session = sessions.open("a", ids(text))
    assert sessions.sample(500) == (500, 0)
    for _ in range(50):
        queue.end_step()
    num_all, num_held = sessions.sample(500)
    assert num_all == 500 and 0.4 < num_held / num_all < 0.6
    assert session.pending == [(0, 50 * CHUNK_TOKENS)]


def test_a_table_with_room_holds_a_text_of_common_words():
    sessions, queue = sessions_in()
    sessions.open("a", ids(np.random.default_rng(0).integers(0, 100, 2000)))
    queue.work()
    num_all, num_held = sessions.sample(500)
    assert num_held > 0.98 * num_all == 0.98 * 500


# Isolation.

actions = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["start", "turn", "branch", "same", "extend", "extend", "finish"]),
        st.lists(st.integers(0, 3), min_size=1, max_size=4),
        st.sampled_from(["", "x", None]),
        st.integers(0, 40),
    ),
    min_size=4,
    max_size=20,
)


def moved_end(prompt, later):
    """Whether the later prompt goes on before the last tokens of the first, which also end it."""
    size = next((i for i, (a, b) in enumerate(zip(prompt, later, strict=False)) if a != b), 0)
    end = prompt[size:]
    return size and len(end) <= TEMPLATE_END and later[max(size, len(later) - len(end)) :] == end


def check_sessions(actions):
    """Fail if a draft has a token that neither its request's text nor an answer of its namespace
    has there; texts begin alike, continue each other, and come back in other namespaces."""
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=100_000))
    live, texts, answers, spelled = {}, [[7, 8, 9, 10]], {}, []

    def check(request_id):
        key, text = live[request_id]
        seen = seen_in(text, 0) | answers.get(key, set())
        for other, prompt, tokens in spelled:
            if other == key and text[: len(prompt)] == prompt:
                seen |= seen_in(tokens, 0)
        check_all_were_seen(draft(proposer, request_id), text, seen)

    for serial, (request_id, action, tokens, namespace, which) in enumerate(actions):
        text = texts[which % len(texts)]
        if action == "extend" and request_id in live:
            key, text = live[request_id]
            read(proposer, {request_id: tokens})
            text += tokens
            answers.setdefault(key, set()).update(seen_in(text, len(text) - len(tokens)))
        elif action == "finish":
            if request_id in live:
                texts.append(live.pop(request_id)[1])
            proposer.finish(request_id)
        elif action != "extend":
            if request_id in live:
                texts.append(live.pop(request_id)[1])
            cut = {"branch": which % len(text), "same": 0}.get(action, len(text))
            prompt = {
                "start": [7, 8, 9, 10, *tokens],
                "same": list(text),
            }.get(action, [*text[: max(4, cut)], *tokens])
            spelling = [*tokens, *(token + 4 for token in tokens), *tokens]
            proposer.start(request_id, prompt, namespace, spellings=[spelling])
            key = namespace if namespace is not None else f"none {serial}"
            spelled += [
                (key, list(prompt), tokens)
                for other, earlier, tokens in spelled
                if other == key and moved_end(earlier, prompt)
            ]
            spelled.append((key, list(prompt), spelling))
            live[request_id] = key, prompt
        for request_id in live:
            check(request_id)


@pytest.mark.usefixtures("_short")
def test_no_draft_has_n_grams_of_another_conversation():
    examples = settings(deadline=None, max_examples=200)
    examples(given(actions)(check_sessions))()


def _keep_all(self, prompt, num_common):
    self.pending.append((num_common, len(prompt)))
    self.tokens, self.num_prompt = prompt, len(prompt)
    return True


def _whatever_follows(self, prompt, num_common):
    return [one for one in self.spellings if one.end > num_common + TEMPLATE_END]


def _of_any_namespace(open_session):
    def wrong(self, digest, *rest):
        return open_session(self, digest and "all", *rest)

    return wrong


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (Session, "continue_with", lambda _: _keep_all),
        (Session, "lost_spellings", lambda _: _whatever_follows),
        (Sessions, "open", _of_any_namespace),
        (module, "MAX_GENERATION_PROMPT", lambda _: 100),
        (module, "_num_common", lambda _: lambda a, b: min(len(a), len(b))),
    ],
)
def test_a_planted_leak_is_noticed(owner, name, wrong, monkeypatch):
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    examples = settings(deadline=None, database=None, phases=[Phase.generate], max_examples=2000)
    with pytest.raises(AssertionError):
        hypothesis_seed(0)(examples(given(actions)(check_sessions)))()


def test_memory_is_allocated_a_page_a_turn():
    """No step waits for all pages of a long text; a later text in the same place waits for none."""
    trie = Trie(1024, 1 << 20)
    sessions = Sessions(trie, InsertionQueue())
    for num_pages in (3, 0):
        session = sessions.open("", text_of(0, 18_000))  # 5.8 MB from the beginning of a page
        filled, turns = trie.num_filled, 0
        while trie.num_filled == filled:
            assert session.insert_chunk()
            turns += 1
        assert turns == num_pages + 1
        sessions.close(session, None)


def test_no_turn_of_a_session_compiles_a_kernel():
    reset_kernels()
    proposer = NGramTrieProposer(LookaheadOptions())
    before = compiled()
    for turn in (text_of(0, 900), text_of(0, 890)):
        proposer.start("a", turn)
        read(proposer, {"a": [1, 2]})
        proposer.finish("a")
    assert not compiled_since(before)
