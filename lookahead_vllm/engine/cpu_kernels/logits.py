"""The kernels that change logits: penalties, biases, bad words, grammars.

They take what vLLM's kernels take. `slots` has the slot of each row of logits, `offsets` the row's
place among its request's rows, and `input_ids` the token before it: the last committed token at
offset 0, draft tokens behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, memory, replaces


@replaces("gpu.sample.penalties._penalties_kernel")
@kernel
def apply_penalties(
    grid: Grid,
    logits: Array,
    stride: int,
    slots: Array,
    input_ids: Array,
    offsets: Array,
    repetition: Array,
    frequency: Array,
    presence: Array,
    prompt_bits: Array,
    prompt_stride: int,
    counts: Array,
    counts_stride: int,
    vocab: int,
) -> None:
    """Draft tokens before a row are counted for its time, then no more."""
    for row in range(grid[0]):
        slot = slots[row]
        repeated, per_count, present = repetition[slot], frequency[slot], presence[slot]
        if repeated == 1 and per_count == 0 and present == 0:
            continue
        in_output = counts[slot * counts_stride : slot * counts_stride + vocab]
        in_prompt = prompt_bits[slot * prompt_stride : (slot + 1) * prompt_stride]
        drafts = input_ids[row - offsets[row] + 1 : row + 1]
        for token in drafts:
            in_output[token] += 1
        values = logits[row * stride : row * stride + vocab]
        for token in range(vocab):
            value, count = values[token], np.float32(in_output[token])
            if count > 0 or (in_prompt[token >> 5] >> (token & 31)) & 1:
                value *= np.float32(1) / repeated if value > 0 else repeated
            value -= per_count * count
            if count > 0:
                value -= present
            values[token] = value
        for token in drafts:
            in_output[token] -= 1


@replaces("gpu.sample.penalties._bincount_kernel")
@kernel
def count_tokens(
    grid: Grid,
    slots: Array,
    tokens: Array,
    tokens_stride: int,
    prompt_lens: Array,
    prefill_lens: Array,
    prompt_bits: Array,
    prompt_stride: int,
    counts: Array,
    counts_stride: int,
) -> None:
    for i in range(grid[0]):
        slot = slots[i]
        text = tokens[slot * tokens_stride : slot * tokens_stride + prefill_lens[slot]]
        for token in text[: prompt_lens[slot]]:
            bit = np.int32(np.uint32(1) << np.uint32(token & 31))
            prompt_bits[slot * prompt_stride + (token >> 5)] |= bit
        for token in text[prompt_lens[slot] :]:
            counts[slot * counts_stride + token] += 1


@replaces("gpu.sample.logit_bias._bias_kernel")
def apply_biases(
    grid: Grid,
    logits: Array,
    stride: int,
    vocab: int,
    slots: Array,
    num_allowed: Array,
    allowed: Array,
    allowed_stride: int,
    num_biases: Array,
    biased: Array,
    biased_stride: int,
    biases: Array,
    biases_stride: int,
    positions: Array,
    min_lens: Array,
    num_stops: Array,
    is_restored: Array,
    stops: Array,
    stops_stride: int,
    CHECK_ALL_MASKED_ROWS: bool = False,
) -> None:
    for row, slot in enumerate(slots[: grid[0]].tolist()):
        values = logits[row * stride : row * stride + vocab]
        if num_allowed[slot] > 0:
            tokens = _of_slot(allowed, allowed_stride, slot, num_allowed)
            kept = values[tokens]
            values.fill(-np.inf)
            values[tokens] = kept
        if num_biases[slot] > 0:
            tokens = _of_slot(biased, biased_stride, slot, num_biases)
            values[tokens] += _of_slot(biases, biases_stride, slot, num_biases)
        if num_stops[slot] > 0 and positions[row] + 1 < min_lens[slot]:
            tokens = _of_slot(stops, stops_stride, slot, num_stops)
            kept = values[tokens]
            values[tokens] = -np.inf
            if CHECK_ALL_MASKED_ROWS and is_restored[slot] and values.max() == -np.inf:
                values[tokens] = np.where(np.isfinite(kept), kept, -np.inf)


def _of_slot(table: Array, stride: int, slot: int, counts: Array) -> Array:
    return table[slot * stride : slot * stride + counts[slot]]


@replaces("gpu.sample.bad_words._bad_words_kernel")
@kernel
def forbid_bad_words(
    grid: Grid,
    logits: Array,
    stride: int,
    slots: Array,
    words: Array,
    words_stride: int,
    word_starts: Array,
    starts_stride: int,
    num_words: Array,
    tokens: Array,
    tokens_stride: int,
    prompt_lens: Array,
    total_lens: Array,
    input_ids: Array,
    offsets: Array,
) -> None:
    for row in range(grid[0]):
        slot = slots[row]
        output = tokens[slot * tokens_stride + prompt_lens[slot] :]
        num_committed = total_lens[slot] - prompt_lens[slot]
        drafts = input_ids[row - offsets[row] + 1 : row + 1]
        num_tokens = num_committed + drafts.size
        for index in range(num_words[slot]):
            start = word_starts[slot * starts_stride + index]
            end = word_starts[slot * starts_stride + index + 1]
            word = words[slot * words_stride + start : slot * words_stride + end]
            first = num_tokens - (word.size - 1)
            if first < 0:
                continue
            is_match = True
            for i in range(word.size - 1):
                at = first + i
                token = output[at] if at < num_committed else drafts[at - num_committed]
                is_match = is_match and token == word[i]
            if is_match:
                logits[row * stride + word[-1]] = -np.inf


@replaces("gpu.structured_outputs._apply_grammar_bitmask_kernel", of_tensors=True)
def apply_grammar(
    grid: Grid,
    logits: torch.Tensor,
    stride: int,
    places: torch.Tensor,
    first_logits: torch.Tensor,
    masks: torch.Tensor,
    masks_stride: int,
    vocab: int,
    MASK_STRIDE: int = 1,
) -> None:
    """Mask i is for the row `places[i] % MASK_STRIDE` of the request `places[i] // MASK_STRIDE`."""
    lowest: Any = np.float32(-np.inf)
    if logits.dtype == torch.bfloat16:
        logits, lowest = logits.view(torch.int16), np.int16(-128)  # the bits of -inf
    values = memory(logits)
    tables = memory(places), memory(first_logits), memory(masks)
    _mask(grid[0], values, stride, *tables, masks_stride, vocab, MASK_STRIDE, lowest)


@kernel
def _mask(
    num_masks: int,
    values: Array,
    stride: int,
    places: Array,
    first_logits: Array,
    masks: Array,
    masks_stride: int,
    vocab: int,
    rows_per_request: int,
    lowest: Any,
) -> None:
    for i in range(num_masks):
        request, offset = places[i] // rows_per_request, places[i] % rows_per_request
        row = first_logits[request] + offset
        if row >= first_logits[request + 1]:
            continue
        for word in range((vocab + 31) // 32):
            bits = masks[i * masks_stride + word]
            if bits == -1:  # all 32 tokens are allowed
                continue
            for token in range(word * 32, min(word * 32 + 32, vocab)):
                if not (bits >> (token & 31)) & 1:
                    values[row * stride + token] = lowest
