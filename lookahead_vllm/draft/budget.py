"""How many nodes a step can afford: the cost of a step, and the cut that makes the most of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.kernel import kernel

OVERHEAD_RATE = 0.02  # the weight of one step in the moving average


class CostCurve:
    """t(l): what a step over l tokens costs, in any unit.

    The forward pass is piecewise linear through the measured points; constant before the first
    one, and going on with the last slope after the last one. More tokens never cost less: a point
    below an earlier one is raised to it.

    Parameters
    ----------
    sizes : Sequence[int]
        Numbers of tokens, rising, at least 1.
    times : Sequence[float]
        What a pass over so many tokens costs, above 0.

    Attributes
    ----------
    overhead : float
        What a step costs beside the forward pass, whatever its size; learned from `observe`.
    """

    def __init__(self, sizes: Sequence[int], times: Sequence[float]) -> None:
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self.times = np.maximum.accumulate(np.asarray(times, dtype=np.float64))
        if len(sizes) == 0 or len(sizes) != len(times):
            raise ValueError(f"{len(sizes)} sizes and {len(times)} times do not make a cost curve")
        if (np.diff(self.sizes, prepend=0) <= 0).any() or not (
            np.isfinite(self.times).all() and self.times[0] > 0
        ):
            raise ValueError(f"the sizes must rise and the times be above 0: {self}")
        self.overhead = 0.0
        self._table: NDArray[np.float64] = np.empty(0)
        self._last_slope = 0.0
        if len(sizes) > 1:
            self._last_slope = float(np.diff(self.times)[-1] / np.diff(self.sizes)[-1])

    def __call__(self, num_tokens: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """t at each of `num_tokens`, float64 of the same shape."""
        return self._forward(num_tokens) + self.overhead

    def between(self, first: int, last: int) -> NDArray[np.float64]:
        """t(first), ..., t(last): float64 [last - first + 1]."""
        if last >= len(self._table):
            self._table = self._forward(np.arange(2 * last + 1))
        return self._table[first : last + 1] + self.overhead

    def observe(self, num_tokens: int, time: float) -> None:
        """Learn the overhead from a real step; one larger than all that was measured is ignored.

        A step that took more than twice its forward pass was held up by something else, and counts
        as one that took twice.
        """
        if num_tokens > self.sizes[-1]:
            return
        forward = float(self._forward(num_tokens))
        overhead = min(max(time - forward, 0.0), forward)
        self.overhead += OVERHEAD_RATE * (overhead - self.overhead)

    def _forward(self, num_tokens: NDArray[np.int64] | int) -> NDArray[np.float64]:
        beyond = np.maximum(0.0, num_tokens - self.sizes[-1])
        inside: NDArray[np.float64] = np.interp(num_tokens, self.sizes, self.times)
        return inside + beyond * self._last_slope

    def __str__(self) -> str:
        points = zip(self.sizes.tolist(), self.times.tolist(), strict=False)
        return ", ".join(f"{size:.0f} tokens {time:.4g}" for size, time in points)


def cut(
    probs: Sequence[NDArray[np.float32]], curve: CostCurve, num_plain_tokens: int = 0
) -> list[int]:
    """How many nodes of each tree to send, so that the step emits the most per unit of cost.

    With R trees, k nodes kept and `num_plain_tokens` other tokens in the step (those of requests
    without a tree), the step is expected to emit `R + sum of the kept probs` and costs
    `t(R + num_plain_tokens + k)`. The k likeliest of all nodes are kept, with the k that maximises
    the quotient, the least such k; 0 is a good answer.

    Parameters
    ----------
    probs : Sequence[float32 [n]]
        Each tree's probabilities, falling or equal, so that what is kept is a prefix.

    Returns
    -------
    list[int]
        The length of the prefix of each tree.
    """
    sizes = np.array([len(p) for p in probs], np.int64)
    total = int(sizes.sum())
    if total == 0:
        return [0] * len(probs)
    first = len(probs) + num_plain_tokens
    return _cut(np.concatenate(probs), sizes, curve.between(first, first + total)).tolist()


@kernel
def _cut(
    probs: NDArray[np.float32], sizes: NDArray[np.int64], costs: NDArray[np.float64]
) -> NDArray[np.int64]:
    """`probs` float32 [n] of all trees, one after another; `costs` float64 [n + 1]."""
    order = np.argsort(-probs, kind="mergesort")
    emitted = float(len(sizes))
    best, best_rate = 0, emitted / costs[0]
    for k in range(len(probs)):
        emitted += probs[order[k]]
        if emitted / costs[k + 1] > best_rate:
            best, best_rate = k + 1, emitted / costs[k + 1]
    owners = np.empty(len(probs), np.int64)
    first = 0
    for owner in range(len(sizes)):
        owners[first : first + sizes[owner]] = owner
        first += sizes[owner]
    kept = np.zeros(len(sizes), np.int64)
    for k in range(best):
        kept[owners[order[k]]] += 1
    return kept
