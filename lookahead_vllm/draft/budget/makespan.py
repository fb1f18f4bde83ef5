"""Which requests of a batch will end last, by the lengths of earlier answers to their prompts."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s

MAX_PROMPTS = 1 << 16
"""The most prompts whose answers' lengths are remembered; the one that started longest ago goes."""

NUM_LENGTHS = 16
"""Lengths that are remembered of each prompt: the latest ones."""

MIN_WEIGHT = 0.1


class AnswerLengths:
    """The weights of requests in a step, if the end of the batch counts and not the tokens.

    A token of a request that will take long brings the end nearer, that of another one does not.
    So the weight of a request is its expected number of tokens to come, in units of the mean. It
    is expected to be as long as those answers to its prompt that were longer than it is now, of
    requests that had ended when it started; if none was, as much again as it has. Answers that end
    while it runs would mislead, as the shortest ones end first. Of a new prompt nothing is known,
    and its weight is 1.

    Requests are named by their rows, see `RequestRows`.
    """

    def __init__(self) -> None:
        self._of_prompts: dict[bytes, NDArray[np.float32]] = {}
        self._prompts: dict[int, bytes] = {}
        self._done: NDArray[np.float32] = np.zeros(0, np.float32)
        self._past: NDArray[np.float32] = np.zeros((0, NUM_LENGTHS), np.float32)
        """float32 [capacity, NUM_LENGTHS]: of each request's prompt; 0 for none."""

    def start(self, row: int, prompt: Int32s, space: int) -> None:
        """A request has started. Those of one namespace share lengths; `space` is its number, 0 for
        none."""
        if row >= len(self._done):
            capacity = max(64, 2 * row)
            self._done = np.resize(self._done, capacity)
            self._past = np.resize(self._past, (capacity, NUM_LENGTHS))
        self._past[row], self._done[row] = 0, 0
        if not space:
            return
        key = hashlib.blake2b(prompt.tobytes() + space.to_bytes(8, "little"), digest_size=16)
        self._prompts[row] = name = key.digest()
        lengths = self._of_prompts.pop(name, None)
        if lengths is None:
            lengths = np.zeros(NUM_LENGTHS, np.float32)
            if len(self._of_prompts) >= MAX_PROMPTS:
                del self._of_prompts[next(iter(self._of_prompts))]
        self._of_prompts[name] = lengths
        self._past[row] = lengths

    def add(self, rows: Int64s, sizes: Int64s) -> None:
        """These requests have emitted so many tokens each; both int64 [t]."""
        self._done[rows] += sizes

    def finish(self, row: int) -> None:
        """The request has ended; later ones with its prompt will know its length."""
        name = self._prompts.pop(row, b"")
        lengths = self._of_prompts.get(name)
        if lengths is not None and self._done[row]:
            lengths[1:] = lengths[:-1].copy()
            lengths[0] = self._done[row]

    def weights(self, rows: Int64s) -> NDArray[np.float32]:
        """The weight of each of these requests, float32 [t]; their mean is about 1."""
        done, past = self._done[rows], self._past[rows]
        longer = past > done[:, None]
        count = longer.sum(axis=1)
        mean = np.where(longer, past, 0).sum(axis=1) / np.maximum(count, 1)
        left = np.where(count > 0, mean - done, done)
        known = past.any(axis=1)
        weights = np.ones(len(rows), np.float32)
        if known.any() and left[known].mean() > 0:
            weights[known] = left[known] / left[known].mean()
        return np.maximum(weights, np.float32(MIN_WEIGHT))
