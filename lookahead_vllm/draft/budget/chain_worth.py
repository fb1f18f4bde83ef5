"""Whether the further passes of a trained drafter are worth their time."""

from __future__ import annotations

import numpy as np

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.sources import DRAFTER
from lookahead_vllm.draft.tree import DraftForest

MEMORY_STEPS = 50
"""Time constant of the averages, in steps."""
TRIAL_STEPS = 100
"""So long, the whole chain is tried before it is judged."""
RETRY_STEPS = 1000
"""Steps with one pass after which the whole chain is tried again."""


class ChainWorth:
    """Judges a drafter's chain by the tokens that it adds.

    The first pass of the drafter has to run after every step. The further ones, which make the rest
    of its chain, run while the speed-up from their tokens is larger than the slow-down from their
    time.

    Parameters
    ----------
    seconds : float
        The time of the further passes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._gained = self._emitted = 0.0
        """Moving averages: tokens of a step that followed from the chain, and all of its tokens."""
        self._trials = self._pause = 0

    def observe(self, forest: DraftForest, paths: Int32s, num_emitted: int) -> None:
        """Learn from a step, if it was drafted with the whole chain.

        Parameters
        ----------
        paths : int32 [t, longest]
            The accepted nodes of each tree, as in `acceptance.accepted_paths`.
        num_emitted
            The tokens of all requests of the step.
        """
        if self._pause:
            return
        is_node = paths >= 0
        from_chain = is_node & (forest.sources[forest.firsts[:-1, None] + paths] == DRAFTER)
        from_chain[:, :1] = False  # these come with the first pass
        gained = int((np.maximum.accumulate(from_chain, axis=1) & is_node).sum())
        self._gained += (gained - self._gained) / MEMORY_STEPS
        self._emitted += (num_emitted - self._emitted) / MEMORY_STEPS
        self._trials += 1

    def next_step(self, step_seconds: float) -> bool:
        """Whether the chain after the next step, which takes this time without it, is whole."""
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self._trials = 0
            return False
        without = self._emitted - self._gained
        if self._trials >= TRIAL_STEPS and self._gained * step_seconds < without * self._seconds:
            self._pause = RETRY_STEPS - 1
            return False
        return True
