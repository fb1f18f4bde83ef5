"""Penalties, bad words and thinking budgets at nodes, row by row: to compare kernels with."""

import numpy as np
import torch
from torch import Tensor

from lookahead_vllm.verify.history import BadWords, Histories, Penalties, Texts, ThinkingBudgets


def path_to(row: int, rows: Histories) -> list[int]:
    """The tokens of the nodes from the first one to the row."""
    path: list[int] = []
    while (parent := int(rows.parents[row])) != row:
        path.insert(0, int(rows.ids[row]))
        row = parent
    return path


def history_of(row: int, rows: Histories, texts: Texts) -> list[int]:
    """The prompt, the output and the path."""
    slot = rows.slots[row]
    text: list[int] = texts.token_ids[slot, : texts.total_lens[slot]].tolist()
    return text + path_to(row, rows)


def apply_penalties(logits: Tensor, rows: Histories, penalties: Penalties) -> None:
    """See `history.apply_penalties`."""
    for row, slot in enumerate(rows.slots.tolist()):
        repetition, frequency, presence, prompt, counts = (p[slot].numpy() for p in penalties)
        if repetition == 1 and not frequency and not presence:
            continue
        values = logits[row].numpy()
        counts = counts + np.bincount(path_to(row, rows), minlength=len(counts)).astype(np.int32)
        in_prompt = np.unpackbits(prompt.view(np.uint8), bitorder="little")[: len(values)]
        is_known = (counts > 0) | (in_prompt != 0)
        scale = np.where(is_known, repetition, np.float32(1))
        values *= np.where(values > 0, np.float32(1) / scale, scale)
        values -= frequency * counts.astype(np.float32)
        values -= presence * (counts > 0).astype(np.float32)


def apply_bad_words(
    logits: Tensor, rows: Histories, texts: Texts, words: BadWords, max_words: int
) -> None:
    """See `history.apply_bad_words`."""
    for row, slot in enumerate(rows.slots.tolist()):
        if not words.counts[slot]:
            continue
        output = history_of(row, rows, texts)[texts.prompt_lens[slot] :]
        for i in range(words.counts[slot]):
            first, end = words.offsets[slot, i : i + 2].tolist()
            *before, last = words.token_ids[slot, first:end].tolist()
            if not before or output[-len(before) :] == before:
                logits[row, last] = -torch.inf


def apply_thinking_budgets(
    logits: Tensor, rows: Histories, slots: Tensor, texts: Texts, thinking: ThinkingBudgets
) -> None:
    """See `history.apply_thinking_budgets`; scans all texts, and remembers nothing."""
    start, end, forced = (marker.tolist() for marker in thinking[4:])
    for row, slot in enumerate(rows.slots.tolist()):
        budget = thinking.budgets[slot]
        if budget < 0:
            continue
        text = history_of(row, rows, texts)
        begun = _last(start, text)
        if begun <= _last(end, text) or len(text) - begun - len(start) < budget:
            continue
        given = max(i for i in range(len(forced)) if text[len(text) - i :] == forced[:i])
        logits[row, forced[given]] = 1e9


def _last(marker: list[int], text: list[int]) -> int:
    places = range(len(text) - len(marker), -1, -1)
    return next((i for i in places if text[i : i + len(marker)] == marker), -1)
