"""A trained drafter's further passes run while their tokens are worth their time."""

import numpy as np
import pytest

from lookahead_vllm.draft.budget.chain import (
    PROBE_STEPS,
    RETRY_STEPS,
    SILENT_STEPS,
    TRIAL_STEPS,
    ChainWorth,
    TrieWorth,
)
from lookahead_vllm.draft.sources import DRAFTER, OWN
from lookahead_vllm.draft.tree import DraftForest, DraftTree

# A chain whose third node is the drafter's alone, and what the trie grows behind it.
CHAIN = DraftTree.from_lists([1, 2, 3, 4], [-1, 0, 1, 2], [0.5] * 4, [DRAFTER, OWN, DRAFTER, OWN])
FOREST = DraftForest.of([CHAIN, DraftTree.chain([5])])


def judged(accepted: int, seconds: float) -> bool:
    """Whether the passes go on after steps of 1 s with so many accepted nodes of the chain."""
    worth = ChainWorth(seconds)
    paths = np.array([[*range(accepted), *[-1] * (4 - accepted)], [0, -1, -1, -1]], np.int32)
    decided = []
    for _ in range(TRIAL_STEPS + 1):
        decided.append(worth.next_step(1.0))
        worth.observe(FOREST, paths, 3 + accepted)
    assert all(decided[:-1])
    return decided[-1]


@pytest.mark.parametrize(
    ("accepted", "gained"),
    [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2)],  # the first node comes with the first pass
)
def test_tokens_that_follow_from_the_chain_are_weighed_against_its_time(accepted, gained):
    worth = gained / (3 + accepted - gained)
    assert judged(accepted, 0.99 * worth + 0.001 * (gained > 0)) is True
    assert judged(accepted, 1.01 * worth + 0.001) is False


def test_after_a_while_the_whole_chain_is_tried_again():
    worth = ChainWorth(1.0)
    none = np.full((2, 4), -1, np.int32)
    decided = []
    for _ in range(2 * (TRIAL_STEPS + RETRY_STEPS)):
        decided.append(worth.next_step(1.0))
        worth.observe(FOREST, none, 2)
    assert sum(decided) == 2 * TRIAL_STEPS
    assert decided[:TRIAL_STEPS] == [True] * TRIAL_STEPS
    assert not any(decided[TRIAL_STEPS : TRIAL_STEPS + RETRY_STEPS])


PROPOSED = np.array([[7, 8, 9], [7, 8, -1], [5, -1, -1]], np.int32)


def waits(worth: TrieWorth, tokens: list[list[int]], steps: int, seconds: float) -> list[bool]:
    """Decisions about steps of 1 s, of which the device waits for so long."""
    counts = np.array([sum(token >= 0 for token in row) for row in tokens], np.int32)
    decided = []
    for _ in range(steps):
        decided.append(worth.waits(1.0 + seconds, seconds))
        if decided[-1]:
            worth.observe(PROPOSED, np.array(tokens, np.int64), counts)
    return decided


@pytest.mark.parametrize(
    ("tokens", "gained"),
    [
        ([[7, 8, 9, 1], [7, 8, 1, -1], [4, -1, -1, -1]], 0),  # all that was accepted is the chain's
        ([[7, 1, 2, 3], [7, 8, 4, 4], [4, -1, -1, -1]], 3),
        ([[1, 2, 3, 4], [-1, -1, -1, -1], [5, 6, 7, 8]], 5),
    ],
)
def test_tokens_that_the_chain_would_not_have_given_are_weighed_against_waiting(tokens, gained):
    emitted = sum(token >= 0 for row in tokens for token in row)
    worth = gained / (emitted - gained)
    if gained:
        assert all(waits(TrieWorth(), tokens, 2 * TRIAL_STEPS, 0.99 * worth))
    decided = waits(TrieWorth(), tokens, TRIAL_STEPS + SILENT_STEPS, 1.01 * worth + 0.001)
    assert decided == [True] * TRIAL_STEPS + [False] * SILENT_STEPS


def test_a_silent_trie_is_asked_now_and_then():
    worth, silent = TrieWorth(), [[7, 8, 9, 1], [7, 8, 1, -1], [4, -1, -1, -1]]
    waits(worth, silent, TRIAL_STEPS + SILENT_STEPS, 0.05)
    decided = waits(worth, silent, PROBE_STEPS + SILENT_STEPS, 0.05)
    assert decided == [True] * PROBE_STEPS + [False] * SILENT_STEPS
    copying = [[1, 2, 3, 4]] * 3
    assert all(waits(worth, copying, 200, 0.05))
