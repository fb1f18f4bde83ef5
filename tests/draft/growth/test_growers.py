"""Threads that grow the trees of a step together grow what one thread grows."""

import random
import threading
import time
from typing import Any

import numpy as np

from lookahead_vllm.draft.growth.growers import (
    COUNT,
    DONE,
    SIZE,
    START,
    STEP_SHIFT,
    TICKET,
    help_grow,
)
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.options.server import LookaheadOptions

NODES = 16
OPTIONS = LookaheadOptions(
    max_nodes=1 << 16, proposer="ngram_trie", num_speculative_tokens=NODES, budget=NODES
)


class CalledEarly(NGramTrieProposer):
    """Its threads wait when the trees are to be grown, as in an engine whose step takes long."""

    def plan(self, *args: Any) -> None:
        super().plan(*args)
        self.stand_by()
        time.sleep(0.002)


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
    alone, together = NGramTrieProposer(OPTIONS), CalledEarly(OPTIONS)
    together.use_threads(2)
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
