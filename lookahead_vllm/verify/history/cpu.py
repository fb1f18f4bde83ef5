"""Penalties, bad words and thinking budgets at the nodes of trees, in compiled calls on a CPU."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import kernel
from lookahead_vllm.verify.history import BadWords, Histories, Penalties, Texts, ThinkingBudgets

Array = NDArray[Any]
Tensors = TypeVar("Tensors", Histories, Texts, Penalties, BadWords, ThinkingBudgets)

_BLOCK = 1024
"""Tokens that are searched for markers at a time, as in vLLM's kernel."""


def apply_penalties(logits: Tensor, rows: Histories, penalties: Penalties) -> None:
    _penalize(logits.numpy(), arrays(rows), arrays(penalties))


def apply_bad_words(
    logits: Tensor, rows: Histories, texts: Texts, words: BadWords, max_words: int
) -> None:
    _exclude(logits.numpy(), arrays(rows), arrays(texts), arrays(words))


def apply_thinking_budgets(
    logits: Tensor, rows: Histories, slots: Tensor, texts: Texts, thinking: ThinkingBudgets
) -> None:
    own, budgets = arrays(texts), arrays(thinking)
    find_markers(slots.numpy(), own, budgets)
    force_ends(logits.numpy(), arrays(rows), own, budgets)


def arrays(tensors: Tensors) -> Tensors:
    """The same named tuple of the memory of its tensors, which are on the CPU."""
    return type(tensors)(*(tensor.numpy() for tensor in tensors))


@kernel
def _penalize(logits: Array, rows: Histories, penalties: Penalties) -> None:
    for row in range(len(logits)):
        slot = rows.slots[row]
        factor = penalties.repetition[slot]
        each, once = penalties.frequency[slot], penalties.presence[slot]
        if factor == 1 and each == 0 and once == 0:
            continue
        values, counts = logits[row], penalties.output_counts[slot]
        here = row
        while rows.parents[here] != here:  # the path is counted for the time of this row
            counts[rows.ids[here]] += 1
            here = rows.parents[here]
        for token in range(len(values)):
            value, count = values[token], np.float32(counts[token])
            if count > 0 or (penalties.prompt_mask[slot, token >> 5] >> (token & 31)) & 1:
                value *= np.float32(1) / factor if value > 0 else factor
            value -= each * count
            if count > 0:
                value -= once
            values[token] = value
        here = row
        while rows.parents[here] != here:
            counts[rows.ids[here]] -= 1
            here = rows.parents[here]


@kernel
def _end_of(row: int, rows: Histories, text: Array, reach: int) -> Array:
    """The last `reach` tokens of a text, or all, and the path to a row."""
    ids, parents = rows.ids, rows.parents
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
def _exclude(logits: Array, rows: Histories, texts: Texts, bad: BadWords) -> None:
    words, offsets = bad.token_ids, bad.offsets
    for row in range(len(logits)):
        slot = rows.slots[row]
        if not bad.counts[slot]:
            continue
        output = texts.token_ids[slot, texts.prompt_lens[slot] : texts.total_lens[slot]]
        end = _end_of(row, rows, output, words.shape[1])
        for i in range(bad.counts[slot]):
            word = words[slot, offsets[slot, i] : offsets[slot, i + 1]]
            before = word[:-1]
            if _stands_at(end, len(end) - len(before), before):
                logits[row, word[-1]] = -np.inf


@kernel
def find_markers(slots: Array, texts: Texts, thinking: ThinkingBudgets) -> None:
    """The last markers in the text that was committed since the last call; see ThinkingBudgets."""
    last_start, last_end, scanned = thinking.last_start, thinking.last_end, thinking.scanned
    for slot in slots:
        if thinking.budgets[slot] < 0:
            continue
        text = texts.token_ids[slot, : texts.total_lens[slot]]
        if scanned[slot] > len(text):
            scanned[slot], last_start[slot], last_end[slot] = 0, -1, -1
        # Backwards; markers before the last block that has any do not matter.
        end, is_found = len(text), False
        while end > scanned[slot] and not is_found:
            begin = max(end - _BLOCK, scanned[slot])
            for place in range(begin, end):
                if _stands_at(text, place, thinking.start_marker):
                    last_start[slot], is_found = place, True
                if _stands_at(text, place, thinking.end_marker):
                    last_end[slot], is_found = place, True
            end = begin
        longest = max(len(thinking.start_marker), len(thinking.end_marker))
        scanned[slot] = max(len(text) - longest + 1, 0)


@kernel
def force_ends(logits: Array, rows: Histories, texts: Texts, thinking: ThinkingBudgets) -> None:
    """Force the next token of the end marker where a budget is used up."""
    start_marker, end_marker = thinking.start_marker, thinking.end_marker
    forced_end = thinking.forced_end
    reach = max(len(start_marker), len(end_marker), len(forced_end))
    for row in range(len(logits)):
        slot = rows.slots[row]
        if thinking.budgets[slot] < 0:
            continue
        text = texts.token_ids[slot, : texts.total_lens[slot]]
        end = _end_of(row, rows, text, reach)
        first = len(text) - min(reach, len(text))
        start = _last_on_path(end, first, len(text), start_marker, thinking.last_start[slot])
        stop = _last_on_path(end, first, len(text), end_marker, thinking.last_end[slot])
        length = first + len(end)
        if start <= stop or length - start - len(start_marker) < thinking.budgets[slot]:
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
