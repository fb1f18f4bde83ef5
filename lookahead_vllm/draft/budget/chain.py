"""What a trained drafter's chain is worth, and what the trie adds to it."""

import numpy as np

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.sources import DRAFTER
from lookahead_vllm.draft.tree import DraftForest

MEMORY_STEPS = 50
"""Time constant of the averages, in steps."""
TRIAL_STEPS = 100
"""So long, the whole chain is tried before it is judged."""
RETRY_STEPS = 1000
"""Steps with one pass after which the whole chain is tried again."""


class _Gains:
    """Moving averages of the tokens of a step: those that something has added, and all."""

    def __init__(self) -> None:
        self.gained = self._emitted = 0.0
        self.trials = 0
        """The steps that count for a judgement."""

    def add(self, gained: int, emitted: int) -> None:
        """A step has emitted so many tokens."""
        self.gained += (gained - self.gained) / MEMORY_STEPS
        self._emitted += (emitted - self._emitted) / MEMORY_STEPS
        self.trials += 1

    @property
    def without(self) -> float:
        """The tokens of a step that would have come anyway."""
        return self._emitted - self.gained


class ChainWorth:
    """Judges a drafter's chain by the tokens that it adds.

    The first pass of the drafter has to run after every step. The further ones, which make the rest
    of its chain, run while the speed-up from their tokens is larger than the slow-down from their
    time, `seconds`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._chain = _Gains()
        self._pause = 0

    def observe(self, forest: DraftForest, paths: Int32s, num_emitted: int) -> None:
        """Learn from a step, if it was drafted with the whole chain.

        `paths` are as in `acceptance.accepted_paths`. All requests have emitted `num_emitted`
        tokens.
        """
        if self._pause:
            return
        is_node = paths >= 0
        from_chain = is_node & (forest.sources[forest.firsts[:-1, None] + paths] == DRAFTER)
        from_chain[:, :1] = False  # these come with the first pass
        gained = int((np.maximum.accumulate(from_chain, axis=1) & is_node).sum())
        self._chain.add(gained, num_emitted)

    def next_step(self, step_seconds: float) -> bool:
        """Whether the chain after the next step, which takes this time without it, is whole."""
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self._chain.trials = 0
            return False
        chain = self._chain
        pays = chain.gained * step_seconds >= chain.without * self._seconds
        if chain.trials >= TRIAL_STEPS and not pays:
            self._pause = RETRY_STEPS - 1
            return False
        return True


SILENT_STEPS = 64
"""After so many steps that did not wait for the trie, some wait, to see whether it would help."""
PROBE_STEPS = 4
"""The number of these."""
EXPLORE_STEPS, EXPLORE_BELOW = 1024, 0.1
"""After so many steps that waited, some do not, so that the price of waiting is known: if the trie
adds less than this share."""


class TrieWorth:
    """Judges the trie by the tokens that its trees add to the drafter's chain.

    A step that is the chain alone can be launched before the host knows it. While the trie adds
    less than the device loses by waiting for it, steps do not wait.
    """

    def __init__(self) -> None:
        self._trie = _Gains()
        self._silent = 0
        self._waited = EXPLORE_STEPS - TRIAL_STEPS
        """Steps since the last one that did not wait."""

    def observe(self, proposed: Int32s, tokens: Int64s, counts: Int32s) -> None:
        """Learn from a step that has waited.

        `proposed`, int32 [r, k], is the drafter's chain after each request's root, or UNKNOWN.
        `tokens`, int64 [r, w], and `counts`, int32 [r], are what the requests have emitted.
        """
        most = min(proposed.shape[1], tokens.shape[1])
        agrees = np.logical_and.accumulate(proposed[:, :most] == tokens[:, :most], axis=1)
        accepted = np.maximum(counts - 1, 0)
        gained = int((accepted - np.minimum(agrees.sum(axis=1), accepted)).sum())
        self._trie.add(gained, int(counts.sum()))

    def waits(self, step_seconds: float, waiting_seconds: float) -> bool:
        """Whether the next step waits, which takes these times in all and for waiting."""
        if self._silent:
            self._silent -= 1
            if not self._silent:
                self._trie.trials = TRIAL_STEPS - PROBE_STEPS
            return False
        self._waited += 1
        trie, plain = self._trie, step_seconds - waiting_seconds
        explores = self._waited > EXPLORE_STEPS and trie.gained < EXPLORE_BELOW * trie.without
        pays = trie.gained * plain >= trie.without * waiting_seconds and not explores
        if trie.trials < TRIAL_STEPS or pays:
            return True
        self._silent, self._waited = SILENT_STEPS - 1, 0
        return False
