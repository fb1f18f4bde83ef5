"""The kernels of thinking budgets.

They take what vLLM's kernels take; see `logits.py` for slots, offsets and input ids.
"""

from __future__ import annotations

import numpy as np

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, replaces


@replaces("gpu.sample.thinking_budget._update_committed_marker_cache_kernel")
@kernel
def find_markers(
    grid: Grid,
    slots: Array,
    budgets: Array,
    tokens: Array,
    tokens_stride: int,
    total_lens: Array,
    last_starts: Array,
    last_ends: Array,
    num_scanned: Array,
    start_marker: Array,
    end_marker: Array,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
) -> None:
    """Where the committed text last opens and closes its thinking, continued from the last step.

    A text that is new is searched from its end, block by block, up to the first marker.
    """
    for request in range(grid[0]):
        slot = slots[request]
        if budgets[slot] < 0:
            continue
        size = total_lens[slot]
        text = tokens[slot * tokens_stride : slot * tokens_stride + size]
        opened, closed, scanned = last_starts[slot], last_ends[slot], num_scanned[slot]
        if scanned > size:
            opened, closed, scanned = np.int32(-1), np.int32(-1), np.int32(0)
        if scanned == 0 and opened < 0 and closed < 0:
            end = size
            while end > 0 and opened < 0 and closed < 0:
                first = max(end - BLOCK, 0)
                opened = np.int32(_last_match(text, start_marker, first, end, -1))
                closed = np.int32(_last_match(text, end_marker, first, end, -1))
                end = first
        else:
            opened = np.int32(_last_match(text, start_marker, scanned, size, opened))
            closed = np.int32(_last_match(text, end_marker, scanned, size, closed))
        last_starts[slot], last_ends[slot] = opened, closed
        num_scanned[slot] = max(size - (MAX_LEN - 1), 0)


@kernel
def _last_match(text: Array, marker: Array, first: int, end: int, default: int) -> int:
    """The last place in [first, end) at which the whole marker stands in the text."""
    for place in range(min(end, text.size - marker.size + 1) - 1, first - 1, -1):
        is_match = True
        for i in range(marker.size):
            is_match = is_match and text[place + i] == marker[i]
        if is_match:
            return place
    return default


@replaces("gpu.sample.thinking_budget._thinking_budget_kernel")
@kernel
def force_end_of_thinking(
    grid: Grid,
    logits: Array,
    stride: int,
    slots: Array,
    budgets: Array,
    tokens: Array,
    tokens_stride: int,
    total_lens: Array,
    input_ids: Array,
    offsets: Array,
    last_starts: Array,
    last_ends: Array,
    start_marker: Array,
    end_marker: Array,
    forced: Array,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    longest = max(START_LEN, NATURAL_END_LEN, END_LEN)
    for row in range(grid[0]):
        slot = slots[row]
        if budgets[slot] < 0:
            continue
        # Only the end of the text matters: markers that reach into the drafts, and a forced end
        # that has begun.
        size = total_lens[slot]
        tail_start = max(size - longest, 0)
        committed = tokens[slot * tokens_stride + tail_start : slot * tokens_stride + size]
        drafts = input_ids[row - offsets[row] + 1 : row + 1]
        tail = np.empty(committed.size + drafts.size, np.int64)
        tail[: committed.size] = committed
        tail[committed.size :] = drafts
        opened = _last_match_in_drafts(tail, start_marker, tail_start, size, last_starts[slot])
        closed = _last_match_in_drafts(tail, end_marker, tail_start, size, last_ends[slot])
        if opened < 0 or opened <= closed:
            continue
        if size + drafts.size - (opened + START_LEN) < budgets[slot]:
            continue
        token = forced[_num_forced(tail, forced)]
        logits[row * stride + token] = np.float32(1e9)


@kernel
def _last_match_in_drafts(
    tail: Array, marker: Array, tail_start: int, size: int, default: int
) -> int:
    """The last place of a marker that does not end in the `size` committed tokens, or default."""
    first = max(size - marker.size + 1, 0) - tail_start
    place = _last_match(tail, marker, first, tail.size, -1)
    return default if place < 0 else place + tail_start


@kernel
def _num_forced(tail: Array, forced: Array) -> int:
    """The number of tokens at the end of the text that begin the forced marker."""
    for length in range(min(forced.size - 1, tail.size), 0, -1):
        if _last_match(tail, forced[:length], tail.size - length, tail.size, -1) >= 0:
            return length
    return 0
