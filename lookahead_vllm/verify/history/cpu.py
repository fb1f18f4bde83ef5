"""Penalties, bad words and thinking budgets at the nodes of trees, in compiled calls on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import kernel
from lookahead_vllm.verify.history import BadWords, Histories, Penalties, Texts, ThinkingBudgets

Array = NDArray[Any]

_BLOCK = 1024
"""Tokens that are searched for markers at a time, as in vLLM's kernel."""


def apply_penalties(logits: Tensor, rows: Histories, penalties: Penalties) -> None:
    _penalize(logits.numpy(), *arrays(rows), *arrays(penalties))


def apply_bad_words(
    logits: Tensor, rows: Histories, texts: Texts, words: BadWords, max_words: int
) -> None:
    _exclude(logits.numpy(), *arrays(rows), *arrays(texts), *arrays(words))


def apply_thinking_budgets(
    logits: Tensor, rows: Histories, slots: Tensor, texts: Texts, thinking: ThinkingBudgets
) -> None:
    tokens, _, lengths = arrays(texts)
    budgets = arrays(thinking)
    find_markers(slots.numpy(), tokens, lengths, *budgets[:6])
    force_ends(logits.numpy(), *arrays(rows), tokens, lengths, *budgets[:3], *budgets[4:])


def arrays(tensors: Iterable[Tensor]) -> list[Array]:
    """The memory of tensors on the CPU."""
    return [tensor.numpy() for tensor in tensors]


@kernel
def _penalize(
    logits: Array,
    slots: Array,
    ids: Array,
    parents: Array,
    repetition: Array,
    frequency: Array,
    presence: Array,
    prompt_mask: Array,
    output_counts: Array,
) -> None:
    for row in range(len(logits)):
        slot = slots[row]
        factor, each, once = repetition[slot], frequency[slot], presence[slot]
        if factor == 1 and each == 0 and once == 0:
            continue
        values, counts = logits[row], output_counts[slot]
        here = row
        while parents[here] != here:  # the path is counted for the time of this row
            counts[ids[here]] += 1
            here = parents[here]
        for token in range(len(values)):
            value, count = values[token], np.float32(counts[token])
            if count > 0 or (prompt_mask[slot, token >> 5] >> (token & 31)) & 1:
                value *= np.float32(1) / factor if value > 0 else factor
            value -= each * count
            if count > 0:
                value -= once
            values[token] = value
        here = row
        while parents[here] != here:
            counts[ids[here]] -= 1
            here = parents[here]


@kernel
def _end_of(row: int, ids: Array, parents: Array, text: Array, reach: int) -> Array:
    """The last `reach` tokens of a text, or all, and the path to a row."""
    depth, here = 0, row
    while parents[here] != here:
        depth, here = depth + 1, parents[here]
    before = min(reach, len(text))
    end = np.empty(before + depth, np.int64)
    end[:before] = text[len(text) - before :]
    here = row
    for place in range(len(end) - 1, before - 1, -1):
        end[place], here = ids[here], parents[here]
    return end


@kernel
def _stands_at(text: Array, place: int, marker: Array) -> bool:
    if place < 0 or place + len(marker) > len(text):
        return False
    matched = 0
    while matched < len(marker) and text[place + matched] == marker[matched]:
        matched += 1
    return matched == len(marker)


@kernel
def _exclude(
    logits: Array,
    slots: Array,
    ids: Array,
    parents: Array,
    token_ids: Array,
    prompt_lens: Array,
    total_lens: Array,
    words: Array,
    offsets: Array,
    counts: Array,
) -> None:
    for row in range(len(logits)):
        slot = slots[row]
        if not counts[slot]:
            continue
        output = token_ids[slot, prompt_lens[slot] : total_lens[slot]]
        end = _end_of(row, ids, parents, output, words.shape[1])
        for i in range(counts[slot]):
            word = words[slot, offsets[slot, i] : offsets[slot, i + 1]]
            before = word[:-1]
            if _stands_at(end, len(end) - len(before), before):
                logits[row, word[-1]] = -np.inf


@kernel
def find_markers(
    slots: Array,
    token_ids: Array,
    total_lens: Array,
    budgets: Array,
    last_start: Array,
    last_end: Array,
    scanned: Array,
    start_marker: Array,
    end_marker: Array,
) -> None:
    """The last markers in the text that was committed since the last call; see ThinkingBudgets."""
    for slot in slots:
        if budgets[slot] < 0:
            continue
        text = token_ids[slot, : total_lens[slot]]
        if scanned[slot] > len(text):
            scanned[slot], last_start[slot], last_end[slot] = 0, -1, -1
        # Backwards; markers before the last block that has any do not matter.
        end, is_found = len(text), False
        while end > scanned[slot] and not is_found:
            begin = max(end - _BLOCK, scanned[slot])
            for place in range(begin, end):
                if _stands_at(text, place, start_marker):
                    last_start[slot], is_found = place, True
                if _stands_at(text, place, end_marker):
                    last_end[slot], is_found = place, True
            end = begin
        longest = max(len(start_marker), len(end_marker))
        scanned[slot] = max(len(text) - longest + 1, 0)


@kernel
def force_ends(
    logits: Array,
    slots: Array,
    ids: Array,
    parents: Array,
    token_ids: Array,
    total_lens: Array,
    budgets: Array,
    last_start: Array,
    last_end: Array,
    start_marker: Array,
    end_marker: Array,
    forced_end: Array,
) -> None:
    """Force the next token of the end marker where a budget is used up."""
    reach = max(len(start_marker), len(end_marker), len(forced_end))
    for row in range(len(logits)):
        slot = slots[row]
        if budgets[slot] < 0:
            continue
        text = token_ids[slot, : total_lens[slot]]
        end = _end_of(row, ids, parents, text, reach)
        first = len(text) - min(reach, len(text))
        start = _last_on_path(end, first, len(text), start_marker, last_start[slot])
        stop = _last_on_path(end, first, len(text), end_marker, last_end[slot])
        length = first + len(end)
        if start <= stop or length - start - len(start_marker) < budgets[slot]:
            continue
        given = 0  # the tokens of the forced end that are already there
        for size in range(1, len(forced_end)):
            if _stands_at(end, len(end) - size, forced_end[:size]):
                given = size
        logits[row, forced_end[given]] = 1e9


@kernel
def _last_on_path(end: Array, first: int, committed: int, marker: Array, default: int) -> int:
    """Where the last marker begins that ends on the path; `end` begins at position `first`."""
    for place in range(len(end) - len(marker), committed - first - len(marker), -1):
        if _stands_at(end, place, marker):
            return first + place
    return default
