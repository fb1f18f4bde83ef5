"""The kernels that change logits: penalties, biases, bad words, thinking budgets, grammars.

They take what vLLM's kernels take. `slots` has the slot of each row of logits, `offsets` the row's
place among its request's rows, and `input_ids` the token before it: the last committed token at
offset 0, draft tokens behind it. Where the history of a row matters, the functions for the nodes of
trees compute it: these rows are chains.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, memory, replaces
from lookahead_vllm.verify.history import BadWords, Histories, Penalties, Texts, ThinkingBudgets
from lookahead_vllm.verify.history import cpu as history


def _chains(slots: Tensor, input_ids: Tensor, offsets: Tensor) -> Histories:
    """Rows whose parent is the row before, except at the first one of a request."""
    rows = torch.arange(len(offsets), dtype=torch.int32)
    return Histories(slots, input_ids, rows - (offsets > 0).int())


@replaces("gpu.sample.penalties._penalties_kernel", of_tensors=True)
def apply_penalties(
    grid: Grid,
    logits: Tensor,
    stride: int,
    slots: Tensor,
    input_ids: Tensor,
    offsets: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    prompt_bits: Tensor,
    prompt_stride: int,
    counts: Tensor,
    counts_stride: int,
    vocab: int,
) -> None:
    penalties = Penalties(repetition, frequency, presence, prompt_bits, counts)
    history.apply_penalties(logits, _chains(slots, input_ids, offsets), penalties)


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


@replaces("gpu.sample.bad_words._bad_words_kernel", of_tensors=True)
def forbid_bad_words(
    grid: Grid,
    logits: Tensor,
    stride: int,
    slots: Tensor,
    words: Tensor,
    words_stride: int,
    word_starts: Tensor,
    starts_stride: int,
    num_words: Tensor,
    tokens: Tensor,
    tokens_stride: int,
    prompt_lens: Tensor,
    total_lens: Tensor,
    input_ids: Tensor,
    offsets: Tensor,
) -> None:
    texts = Texts(tokens, prompt_lens, total_lens)
    bad_words = BadWords(words, word_starts, num_words)
    rows = _chains(slots, input_ids, offsets)
    history.apply_bad_words(logits, rows, texts, bad_words, grid[1])


def _texts(tokens: Tensor, total_lens: Tensor) -> Texts:
    """Texts whose prompts are not told from their output."""
    return history.arrays(Texts(tokens, total_lens, total_lens))


@replaces("gpu.sample.thinking_budget._update_committed_marker_cache_kernel", of_tensors=True)
def find_markers(
    grid: Grid,
    slots: Tensor,
    budgets: Tensor,
    tokens: Tensor,
    tokens_stride: int,
    total_lens: Tensor,
    last_starts: Tensor,
    last_ends: Tensor,
    num_scanned: Tensor,
    start_marker: Tensor,
    end_marker: Tensor,
) -> None:
    """Where the committed text last opens and closes its thinking, continued from the last step."""
    markers = start_marker, end_marker, end_marker  # the last one is not read
    thinking = ThinkingBudgets(budgets, last_starts, last_ends, num_scanned, *markers)
    history.find_markers(slots.numpy(), _texts(tokens, total_lens), history.arrays(thinking))


@replaces("gpu.sample.thinking_budget._thinking_budget_kernel", of_tensors=True)
def force_end_of_thinking(
    grid: Grid,
    logits: Tensor,
    stride: int,
    slots: Tensor,
    budgets: Tensor,
    tokens: Tensor,
    tokens_stride: int,
    total_lens: Tensor,
    input_ids: Tensor,
    offsets: Tensor,
    last_starts: Tensor,
    last_ends: Tensor,
    *markers: Tensor,
) -> None:
    rows = history.arrays(_chains(slots, input_ids, offsets))
    not_read = last_ends
    thinking = ThinkingBudgets(budgets, last_starts, last_ends, not_read, *markers)
    texts = _texts(tokens, total_lens)
    history.force_ends(logits.numpy(), rows, texts, history.arrays(thinking))


@replaces("gpu.metrics.logits._num_nans_kernel", of_tensors=True)
def count_nans(grid: Grid, logits: Tensor, stride: int, num_nans: Tensor, vocab: int) -> None:
    num_nans.copy_(logits.isnan().sum(dim=1))


@replaces("gpu.structured_outputs._apply_grammar_bitmask_kernel", of_tensors=True)
def apply_grammar(
    grid: Grid,
    logits: Tensor,
    stride: int,
    places: Tensor,
    first_logits: Tensor,
    masks: Tensor,
    masks_stride: int,
    vocab: int,
    MASK_STRIDE: int = 1,
) -> None:
    """Mask i is for the row `places[i] % MASK_STRIDE` of the request `places[i] // MASK_STRIDE`."""
    lowest: Any = np.float32(-np.inf)
    if logits.dtype != torch.float32:
        bits = torch.tensor(-torch.inf, dtype=logits.dtype).view(torch.int16)
        logits, lowest = logits.view(torch.int16), np.int16(bits)
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
