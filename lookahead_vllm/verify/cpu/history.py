"""Penalties, bad words and thinking budgets at the nodes of trees, for tensors on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel

if TYPE_CHECKING:
    from lookahead_vllm.verify.history import (
        BadWords,
        Histories,
        Penalties,
        Texts,
        ThinkingBudgets,
    )

Float32s: TypeAlias = NDArray[np.float32]

_FORCED = np.float32(1e9)


def apply_penalties(logits: Tensor, rows: Histories, penalties: Penalties) -> None:
    """See `history.apply_penalties`."""
    _penalize(logits.numpy(), *_arrays(rows), *(part.numpy() for part in penalties))


def apply_bad_words(
    logits: Tensor, rows: Histories, texts: Texts, words: BadWords, max_words: int
) -> None:
    """See `history.apply_bad_words`."""
    text_and_words = (part.numpy() for part in (*texts, *words))
    _exclude_bad_words(logits.numpy(), *_arrays(rows), *text_and_words)


def apply_thinking_budgets(
    logits: Tensor, rows: Histories, slots: Tensor, texts: Texts, thinking: ThinkingBudgets
) -> None:
    """See `history.apply_thinking_budgets`."""
    state = [part.numpy() for part in thinking]
    text, total_lens = texts.token_ids.numpy(), texts.total_lens.numpy()
    _find_markers(slots.long().numpy(), text, total_lens, *state[:6])
    _force_ends(logits.numpy(), *_arrays(rows), text, total_lens, *state)


def _arrays(rows: Histories) -> tuple[Int64s, Int64s, Int32s]:
    return rows.slots.long().numpy(), rows.ids.long().numpy(), rows.parents.numpy()


@kernel
def _penalize(
    logits: Float32s,
    slots: Int64s,
    ids: Int64s,
    parents: Int32s,
    repetition: Float32s,
    frequency: Float32s,
    presence: Float32s,
    prompt_mask: Int32s,
    output_counts: Int32s,
) -> None:
    vocab = logits.shape[1]
    path = np.empty(len(slots), np.int64)
    before = np.empty(len(slots), np.float32)
    for row in range(len(slots)):
        slot = slots[row]
        factor, each, any_ = repetition[slot], frequency[slot], presence[slot]
        if factor == 1 and each == 0 and any_ == 0:
            continue
        inverse = np.float32(1) / factor
        values, counts, words = logits[row], output_counts[slot], prompt_mask[slot]
        length, here = 0, row
        while parents[here] != here:
            if 0 <= ids[here] < vocab:
                path[length], before[length] = ids[here], values[ids[here]]
                length += 1
            here = parents[here]
        for word in range(len(words)):
            bits, first = words[word], word * 32
            for bit in range(min(32, vocab - first)):
                token = first + bit
                values[token] = _penalized(
                    values[token], counts[token], bits >> bit & 1, factor, inverse, each, any_
                )
        for i in range(length):  # again, with the path's tokens counted
            token, count = path[i], counts[path[i]]
            for j in range(length):
                count += path[j] == token
            in_prompt = words[token >> 5] >> (token & 31) & 1
            values[token] = _penalized(before[i], count, in_prompt, factor, inverse, each, any_)


@kernel
def _penalized(
    value: np.float32,
    count: int,
    in_prompt: int,
    factor: np.float32,
    inverse: np.float32,
    each: np.float32,
    any_: np.float32,
) -> np.float32:
    if count > 0 or in_prompt:
        value *= inverse if value > 0 else factor
    value -= each * np.float32(count)
    return value - any_ * np.float32(count > 0)


@kernel
def _exclude_bad_words(
    logits: Float32s,
    slots: Int64s,
    ids: Int64s,
    parents: Int32s,
    text: Int32s,
    prompt_lens: Int32s,
    total_lens: Int32s,
    words: Int32s,
    offsets: Int32s,
    counts: Int32s,
) -> None:
    for row in range(len(slots)):
        slot = slots[row]
        if not counts[slot]:
            continue
        output = text[slot, prompt_lens[slot] : total_lens[slot]]
        for i in range(counts[slot]):
            word = words[slot, offsets[slot, i] : offsets[slot, i + 1]]
            if _ends_with(word[:-1], ids, parents, row, output):
                logits[row, word[-1]] = -np.inf


@kernel
def _ends_with(marker: Int32s, ids: Int64s, parents: Int32s, row: int, text: Int32s) -> bool:
    """Whether `text` and the path to the row, together, end with `marker`."""
    left = len(text)
    for place in range(len(marker) - 1, -1, -1):
        if parents[row] != row:
            token = ids[row]
            row = parents[row]
        elif left > 0:
            left -= 1
            token = np.int64(text[left])
        else:
            return False
        if token != marker[place]:
            return False
    return True


@kernel
def _find_markers(
    slots: Int64s,
    text: Int32s,
    total_lens: Int32s,
    budgets: Int32s,
    last_start: Int32s,
    last_end: Int32s,
    scanned: Int32s,
    start_marker: Int32s,
    end_marker: Int32s,
) -> None:
    """Find the last markers in the text that was committed since the last call."""
    for slot in slots:
        if budgets[slot] < 0:
            continue
        total = total_lens[slot]
        if scanned[slot] > total:
            scanned[slot], last_start[slot], last_end[slot] = 0, -1, -1
        for position in range(total - 1, scanned[slot] - 1, -1):
            starts = _is_at(position, start_marker, text[slot, :total])
            ends = _is_at(position, end_marker, text[slot, :total])
            if starts:
                last_start[slot] = position
            if ends:
                last_end[slot] = position
            if starts or ends:  # markers before it do not matter
                break
        longest = max(len(start_marker), len(end_marker))
        scanned[slot] = max(total - longest + 1, 0)


@kernel
def _is_at(position: int, marker: Int32s, text: Int32s) -> bool:
    if position + len(marker) > len(text):
        return False
    same = 0
    while same < len(marker) and text[position + same] == marker[same]:
        same += 1
    return same == len(marker)


@kernel
def _force_ends(
    logits: Float32s,
    slots: Int64s,
    ids: Int64s,
    parents: Int32s,
    text: Int32s,
    total_lens: Int32s,
    budgets: Int32s,
    last_start: Int32s,
    last_end: Int32s,
    scanned: Int32s,
    start_marker: Int32s,
    end_marker: Int32s,
    forced_end: Int32s,
) -> None:
    for row in range(len(slots)):
        slot = slots[row]
        if budgets[slot] < 0:
            continue
        committed = text[slot, : total_lens[slot]]
        length, here = len(committed), row
        while parents[here] != here:
            length += 1
            here = parents[here]
        # The last markers that end on the path, else those of the text.
        start, end = last_start[slot], last_end[slot]
        starts, ends, here, behind = False, False, row, length
        while parents[here] != here:
            if not starts and _ends_with(start_marker, ids, parents, here, committed):
                starts, start = True, behind - len(start_marker)
            if not ends and _ends_with(end_marker, ids, parents, here, committed):
                ends, end = True, behind - len(end_marker)
            here = parents[here]
            behind -= 1
        if start <= end or length - start - len(start_marker) < budgets[slot]:
            continue
        given = len(forced_end) - 1  # the tokens of the forced end that are already there
        while not _ends_with(forced_end[:given], ids, parents, row, committed):
            given -= 1
        logits[row, forced_end[given]] = _FORCED
