"""Captured CUDA graphs of the whole model: a pass costs what the graph costs that it is padded to.

A graph has a fixed number of tokens. A pass over fewer tokens runs the smallest graph that holds
them, so its time rises in jumps, and between two sizes more tokens are free.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class GraphTimes:
    """The sizes of captured graphs, in rising numbers of tokens, and the time of a pass in each.

    The times are in the unit of the cost curve, and leave attention to the context out, as it does.
    They never fall: one below an earlier one is raised to it.
    """

    def __init__(self, sizes: Sequence[int] = (), times: Sequence[float] = ()) -> None:
        self.sizes = list(sizes)
        self.times = np.maximum.accumulate(np.asarray(times, dtype=np.float64))

    @property
    def largest(self) -> int:
        """The largest captured size; 0 if there is no graph."""
        return self.sizes[-1] if self.sizes else 0

    def padded(self, num_tokens: int) -> int:
        """The size of the graph that runs a pass; `num_tokens` itself if no graph can."""
        place = bisect_left(self.sizes, num_tokens)
        return self.sizes[place] if place < len(self.sizes) else num_tokens

    def overlay(
        self, num_tokens: NDArray[np.int64] | int, outside: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The times `outside` of graphs, with a graph's time wherever one holds the tokens."""
        if not self.sizes:
            return outside
        places = np.searchsorted(self.sizes, num_tokens)
        inside = self.times[np.minimum(places, len(self.sizes) - 1)]
        return np.where(places < len(self.sizes), inside, outside)

    def __str__(self) -> str:
        points = zip(self.sizes, self.times.tolist(), strict=False)
        return ", ".join(f"{size} tokens {time:.4g}" for size, time in points) or "no graphs"


class CapturedSizes(NamedTuple):
    """The graphs that serve the steps of an engine. Steps with prompts use none."""

    without_drafts: GraphTimes
    """For steps without drafts, by the number of requests, each of which has one token."""
    with_drafts: GraphTimes
    """For steps with drafts, by the number of tokens: one for each request, and the nodes."""


NO_GRAPHS = GraphTimes()
NOTHING_CAPTURED = CapturedSizes(NO_GRAPHS, NO_GRAPHS)
