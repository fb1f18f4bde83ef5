"""Threads that grow the trees of a step, and learn from its tokens, do what one thread does."""

import random
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.draft import instructions
from lookahead_vllm.draft.growth import growers as growers_module
from lookahead_vllm.draft.growth.growers import (
    COUNT,
    DONE,
    SIZE,
    START,
    STEP_SHIFT,
    TICKET,
    UNLEARNED,
    help_grow,
)
from lookahead_vllm.draft.jit import kernel
from lookahead_vllm.draft.progress import EmittedTokens, WantedDrafts
from lookahead_vllm.draft.proposers import stepping
from lookahead_vllm.draft.proposers.hybrid import HybridProposer
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.proposer import NO_LOAD
from lookahead_vllm.draft.proposers.stepping import ENDLESS, DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.options.server import LookaheadOptions

NODES = 16
OPTIONS = LookaheadOptions(
    max_nodes=1 << 16, proposer="ngram_trie", num_speculative_tokens=NODES, budget=NODES
)


class WithThreads:
    """Its two threads have learned when it would, as in an engine in which a launch takes long."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.use_threads(2)  # type: ignore[attr-defined]

    def plan(self, *args: Any) -> None:
        super().plan(*args)  # type: ignore[misc]
        self.stand_by()  # type: ignore[attr-defined]
        time.sleep(0.002)

    def learn(self) -> None:
        gate = self._growers._trees.gate  # type: ignore[attr-defined]
        end = time.monotonic() + 0.03
        while gate[UNLEARNED] > 0 and time.monotonic() < end:
            time.sleep(0.002)
        super().learn()  # type: ignore[misc]


def with_threads(kind: type[NGramTrieProposer]) -> Any:
    return type("", (WithThreads, kind), {})


def next_token(rng: random.Random, token: int) -> int:
    """Three of four tokens follow from the last one."""
    return (token * 7 + 3) % 97 if rng.random() < 0.75 else rng.randrange(97)


def text(rng: random.Random, length: int) -> list[int]:
    tokens = [rng.randrange(97)]
    while len(tokens) < length:
        tokens.append(next_token(rng, tokens[-1]))
    return tokens


def draft(proposer: NGramTrieProposer, count: int) -> DraftForest:
    return draft_trees(proposer, [DraftLimits(str(i), NODES, NODES) for i in range(count)])


def test_forests_do_not_depend_on_threads():
    alone, together = NGramTrieProposer(OPTIONS), with_threads(NGramTrieProposer)(OPTIONS)
    rng = random.Random(0)
    num_nodes = count = 0
    for step in range(60):
        if step % 6 == 0:  # more requests, and more nodes, than there were before
            first, count = count, count + 6
            for i in range(first, count):
                prompt = text(rng, 60)
                for proposer in (alone, together):
                    proposer.start(str(i), prompt)
        expected, forest = draft(alone, count), draft(together, count)
        for name, array in vars(expected).items():
            np.testing.assert_array_equal(getattr(forest, name), array, name)
        num_nodes += forest.num_nodes
        new = {str(i): text(rng, rng.randint(1, 4)) for i in range(count)}
        for proposer in (alone, together):
            read(proposer, new)
    assert num_nodes > 10_000


def engine_step(
    proposer: NGramTrieProposer, new: list[list[int]], verified: Verified | None
) -> DraftForest:
    """Count the tokens of all requests, draft, and learn from the tokens."""
    count, width = len(new), max(map(len, new))
    tokens = np.array([own + [0] * (width - len(own)) for own in new])
    counts = np.array([len(own) for own in new], np.int32)
    emitted = EmittedTokens(np.arange(count), tokens, counts)
    request_ids = [str(i) for i in range(count)]
    wanted = WantedDrafts(np.arange(count), np.full(count, NODES), np.ones(count, np.bool_))
    progress = stepping._progress_of(proposer, request_ids, np.full(count, ENDLESS))
    proposer.plan(request_ids, wanted, np.full(count, 60), NO_LOAD, verified)
    forest = proposer.draft(progress, emitted, emitted.new_spans(), wanted, ENDLESS)[0]
    proposer.learn()
    return forest


@pytest.mark.parametrize("kind", [NGramTrieProposer, HybridProposer])
def test_what_is_learned_does_not_depend_on_threads(kind, monkeypatch):
    options = LookaheadOptions(
        max_nodes=1 << 16, num_speculative_tokens=NODES, budget=NODES, window_size=0
    )
    alone, together = kind(options), with_threads(kind)(options)
    calls = dict.fromkeys((id(alone.trie.edges), id(together.trie.edges)), 0)
    learn = growers_module.learn_tokens

    def learn_tokens(trie: Any, *args: Any) -> None:
        calls[id(trie[0])] += 1
        learn(trie, *args)

    monkeypatch.setattr(growers_module, "learn_tokens", learn_tokens)
    rng, verified = random.Random(0), None
    for _ in range(4):
        for i in range(12):
            prompt = text(rng, 60)
            for proposer in (alone, together):
                proposer.start(str(i), prompt)  # instead of the last one
        for _ in range(15):
            new = [text(rng, rng.randint(1, 4)) for _ in range(12)]
            forest = engine_step(alone, new, verified)
            for name, array in vars(engine_step(together, new, verified)).items():
                np.testing.assert_array_equal(getattr(forest, name), array, name)
            verified = None
            if kind is HybridProposer:
                verified = Verified.nothing([str(i) for i in range(12)], forest, alone.num_choices)
                verified.tokens[:] = [
                    [rng.randrange(97) for _ in range(alone.num_choices)] for _ in verified.tokens
                ]
        verified = None
    assert calls[id(alone.trie.edges)] == 60
    assert calls[id(together.trie.edges)] < 50  # the threads did the others
    for mine, other in ((alone.trie, together.trie), (alone.rate, together.rate)):
        for array, expected in zip(other.arrays, mine.arrays, strict=True):
            np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(together._lines, alone._lines)


@pytest.mark.parametrize("entry", ["draft", "finish", "insert", "start"])
def test_what_reads_the_trie_waits_for_a_thread_that_learns(entry):
    proposer = NGramTrieProposer(OPTIONS)
    proposer.start("0", [1, 2, 3, 1, 2])
    draft(proposer, 1)
    gate, ended = proposer._growers._trees.gate, list[float]()

    def learn() -> None:
        time.sleep(0.05)
        ended.append(time.perf_counter())
        gate[UNLEARNED] = 0

    gate[UNLEARNED] = growers_module.TAKEN
    proposer._is_unsent = True
    thread = threading.Thread(target=learn)
    thread.start()
    if entry == "draft":
        draft(proposer, 1)
    elif entry == "finish":
        proposer.finish("0")
    elif entry == "start":
        proposer.start("1", [1, 2])
    else:
        proposer.work_for(0.0)
    assert ended and time.perf_counter() > ended[0]
    thread.join()


@partial(kernel, nogil=True)
def _learn_slowly(gate: np.ndarray, table: np.ndarray, turn: int) -> None:
    """As a thread that learns: with the turn, without the interpreter's lock."""
    while not instructions.replace_atomic(gate, UNLEARNED, turn, growers_module.TAKEN):
        instructions.pause()
    for i in range(len(table)):
        table[i] += 1
        instructions.pause()
    instructions.store_atomic(gate, UNLEARNED, 0)


def test_what_is_saved_is_copied_while_no_thread_learns():
    proposer, turn, num_waits = NGramTrieProposer(OPTIONS), 7, 0
    gate, table = proposer._growers._trees.gate, np.zeros(200_000, np.uint8)
    copied = np.empty_like(table)
    for value in range(1, 20):
        gate[UNLEARNED] = turn
        thread = threading.Thread(target=_learn_slowly, args=(gate, table, turn))
        thread.start()
        while thread.is_alive():
            time.sleep(0)
            learns = gate[UNLEARNED] == growers_module.TAKEN
            proposer.copy(table, copied)
            assert (copied == copied[0]).all()
            if learns:
                assert copied[0] == value
                num_waits += 1
        assert (table == value).all() and gate[UNLEARNED] == 0
    assert num_waits


def test_threads_do_not_learn_beside_the_thread_of_a_fleet(monkeypatch):
    class Fleet:
        def follow(self, *args: Any) -> None: ...
        def send(self, *args: Any) -> None: ...

    proposer = with_threads(NGramTrieProposer)(OPTIONS)
    proposer.fleet = Fleet()
    calls, learn = list[int](), growers_module.learn_tokens

    def learn_tokens(*args: Any) -> None:
        calls.append(threading.get_ident())
        learn(*args)

    monkeypatch.setattr(growers_module, "learn_tokens", learn_tokens)
    rng = random.Random(3)
    for i in range(8):
        proposer.start(str(i), text(rng, 60))
    for _ in range(10):
        engine_step(proposer, [text(rng, 2) for _ in range(8)], None)
    assert calls == [threading.get_ident()] * 10


def test_a_thread_grows_all_trees_if_the_others_take_none():
    proposer, rng = NGramTrieProposer(OPTIONS), random.Random(1)
    for i in range(8):
        proposer.start(str(i), text(rng, 200))
    assert draft(proposer, 8).num_nodes > 50
    growers = proposer._growers
    gate, trees, nodes = growers._trees
    expected = [array.copy() for array in (trees, *nodes)]
    nodes.fields[:] = nodes.probs[:] = nodes.sources[:] = trees[:, SIZE] = 0
    step = int(gate[TICKET]) >> STEP_SHIFT
    gate[DONE], gate[TICKET] = 0, step + 1 << STEP_SHIFT
    arguments = *proposer._tables, *growers.shared, False, step + 1
    thread = threading.Thread(target=help_grow, args=arguments)
    thread.start()
    while gate[DONE] < 8:
        time.sleep(0)
    gate[TICKET] = step + 2 << STEP_SHIFT  # another step begins
    thread.join()
    sizes = trees[:8, SIZE]
    used = np.concatenate([start + np.arange(size) for start, size in trees[:8, START:].tolist()])
    np.testing.assert_array_equal(trees[:8], expected[0][:8])
    assert sizes.sum() == len(used) > 50
    for array, own in zip(nodes, expected[1:], strict=True):
        np.testing.assert_array_equal(array[..., used], own[..., used])


def test_a_late_thread_takes_nothing_from_another_step():
    proposer = NGramTrieProposer(OPTIONS)
    proposer.start("0", [1, 2, 3, 1, 2])
    draft(proposer, 1)
    growers = proposer._growers
    gate = growers._trees.gate
    step = int(gate[TICKET]) >> STEP_SHIFT
    gate[DONE], gate[COUNT], gate[TICKET] = 0, 1, step + 1 << STEP_SHIFT  # all may be taken
    help_grow(*proposer._tables, *growers.shared, True, step)
    assert (gate[DONE], gate[TICKET]) == (0, step + 1 << STEP_SHIFT)


def test_threads_that_were_called_for_nothing_leave():
    proposer = NGramTrieProposer(OPTIONS)
    for i in range(8):
        proposer.start(str(i), [1, 2, 3, 1, 2])
    proposer.use_threads(1)
    growers = proposer._growers
    growers.make_room(8, 8 * NODES)
    for _ in range(50):
        proposer.stand_by()
    growers.dismiss()
    while not growers._calls.empty():
        time.sleep(0)
    assert draft(proposer, 8).num_nodes
