"""Where a step's time goes: filled while the environment variable LOOKAHEAD_VLLM_PROFILE is 1."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

enabled = os.environ.get("LOOKAHEAD_VLLM_PROFILE") == "1"

seconds: defaultdict[str, float] = defaultdict(float)
"""Wall time by part: draft, attention (of branching trees), verify, compaction; step is all."""


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Add the wall time of the block to `seconds[part]`."""
    if not enabled:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] += time.perf_counter() - start
