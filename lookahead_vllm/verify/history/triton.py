"""Penalties, bad words and thinking budgets at the nodes of trees, in one or two launches each."""

import triton
import triton.language as tl
from torch import Tensor

from lookahead_vllm.verify.history import BadWords, Histories, Penalties, Texts, ThinkingBudgets

_BLOCK = 2048
"""Tokens of the vocabulary for one program."""
_SCAN_BLOCK = 1024
_ROWS = ["slots", "ids", "parents"]


def apply_penalties(logits: Tensor, rows: Histories, penalties: Penalties) -> None:
    vocab = logits.shape[1]
    _penalize[(len(logits), triton.cdiv(vocab, _BLOCK))](
        logits, *rows, *penalties, vocab, logits.stride(0),
        penalties.prompt_mask.stride(0), penalties.output_counts.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip


def apply_bad_words(
    logits: Tensor, rows: Histories, texts: Texts, words: BadWords, max_words: int
) -> None:
    _exclude_bad_words[(len(logits), max_words)](
        logits, *rows, *texts, *words, logits.stride(0), texts.token_ids.stride(0),
        words.token_ids.stride(0), words.offsets.stride(0), num_warps=1,
    )  # fmt: skip


def apply_thinking_budgets(
    logits: Tensor, rows: Histories, slots: Tensor, texts: Texts, thinking: ThinkingBudgets
) -> None:
    lengths = [len(marker) for marker in thinking[4:]]
    _find_markers[(len(slots),)](
        slots, texts.token_ids, texts.total_lens, *thinking[:6],
        texts.token_ids.stride(0), *lengths[:2], BLOCK=_SCAN_BLOCK,
    )  # fmt: skip
    _force_ends[(len(logits),)](
        logits, *rows, texts.token_ids, texts.total_lens, *thinking,
        logits.stride(0), texts.token_ids.stride(0), *lengths, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _penalize(
    logits, slots, ids, parents,
    repetition, frequency, presence, prompt_mask, output_counts,
    vocab, logits_stride, mask_stride, counts_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, one block of the vocabulary."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    factor = tl.load(repetition + slot)
    each, once = tl.load(frequency + slot), tl.load(presence + slot)
    if (factor == 1.0) & (each == 0.0) & (once == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_vocab = token < vocab
    counts = tl.load(output_counts + slot * counts_stride + token, mask=in_vocab, other=0)
    here = row
    parent = tl.load(parents + here)
    while parent != here:
        counts += (token == tl.load(ids + here)).to(tl.int32)
        here = parent
        parent = tl.load(parents + here)
    is_output = counts > 0

    place = logits + row.to(tl.int64) * logits_stride + token
    values = tl.load(place, mask=in_vocab)
    if factor != 1.0:
        words = tl.load(prompt_mask + slot * mask_stride + token // 32, mask=in_vocab, other=0)
        is_known = is_output | ((words >> (token % 32)) & 1 != 0)
        scale = tl.where(is_known, factor, 1.0)
        values *= tl.where(values > 0, 1.0 / scale, scale)
    values -= each * counts
    values -= once * is_output
    tl.store(place, values, mask=in_vocab)


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _exclude_bad_words(
    logits, slots, ids, parents, text, prompt_lens, total_lens, words, offsets, counts,
    logits_stride, text_stride, words_stride, offsets_stride,
):  # fmt: skip
    """One row, one bad word."""
    row, word = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if word >= tl.load(counts + slot):
        return
    first = tl.load(offsets + slot * offsets_stride + word)
    last = tl.load(offsets + slot * offsets_stride + word + 1) - 1
    prompt_len = tl.load(prompt_lens + slot)
    output = text + slot * text_stride + prompt_len
    output_len = tl.load(total_lens + slot) - prompt_len
    words += slot * words_stride
    if _ends_with(words + first, last - first, ids, parents, row, output, output_len):
        token = tl.load(words + last)
        tl.store(logits + row.to(tl.int64) * logits_stride + token, -float("inf"))


@triton.jit
def _ends_with(marker, length, ids, parents, row, text, text_len):
    """Whether the text and the path to the row, together, end with the marker."""
    here, left, place, mismatches = row, text_len, length - 1, 0
    while (place >= 0) & (mismatches == 0):
        parent = tl.load(parents + here)
        is_node = parent != here
        left -= tl.where(is_node, 0, 1)
        node_token = tl.load(ids + here, mask=is_node, other=-1)
        text_token = tl.load(text + left, mask=(left >= 0) & (parent == here), other=-1)
        token = tl.where(is_node, node_token, text_token)
        mismatches += (token != tl.load(marker + place)).to(tl.int32)
        here = parent
        place -= 1
    return mismatches == 0


@triton.jit(do_not_specialize=["start_len", "end_len"], do_not_specialize_on_alignment=["slots"])
def _find_markers(
    slots, text, total_lens, budgets, last_start, last_end, scanned, start_marker, end_marker,
    text_stride, start_len, end_len, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the last markers in the text of one slot that was committed since the last call."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if tl.load(budgets + slot) < 0:
        return
    total = tl.load(total_lens + slot)
    low = tl.load(scanned + slot)
    start, end = tl.load(last_start + slot), tl.load(last_end + slot)
    if low > total:
        low, start, end = 0, -1, -1
    text += slot * text_stride
    # Backwards; markers before the last one do not matter.
    high, found = total, 0
    while (high > low) & (found == 0):
        position = high - BLOCK + tl.arange(0, BLOCK)
        is_new = position >= low
        starts = is_new & (position + start_len <= total)
        for i in range(start_len):
            token = tl.load(text + position + i, mask=starts, other=-1)
            starts = starts & (token == tl.load(start_marker + i))
        ends = is_new & (position + end_len <= total)
        for i in range(end_len):
            token = tl.load(text + position + i, mask=ends, other=-1)
            ends = ends & (token == tl.load(end_marker + i))
        start_here = tl.max(tl.where(starts, position, -1), 0)
        end_here = tl.max(tl.where(ends, position, -1), 0)
        start = tl.maximum(start, start_here)
        end = tl.maximum(end, end_here)
        found = (tl.maximum(start_here, end_here) >= 0).to(tl.int32)
        high -= BLOCK
    tl.store(last_start + slot, start)
    tl.store(last_end + slot, end)
    tl.store(scanned + slot, tl.maximum(total - tl.maximum(start_len, end_len) + 1, 0))


@triton.jit(
    do_not_specialize=["start_len", "end_len", "forced_len"],
    do_not_specialize_on_alignment=_ROWS,
)
def _force_ends(
    logits, slots, ids, parents, text, total_lens,
    budgets, last_start, last_end, scanned, start_marker, end_marker, forced_end,
    logits_stride, text_stride, start_len, end_len, forced_len,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    budget = tl.load(budgets + slot)
    if budget < 0:
        return
    text += slot * text_stride
    total = tl.load(total_lens + slot)
    length = total
    here = row
    parent = tl.load(parents + here)
    while parent != here:
        length += 1
        here = parent
        parent = tl.load(parents + here)

    # The last markers that end on the path, else those of the text.
    start, end = tl.load(last_start + slot), tl.load(last_end + slot)
    has_start, has_end, behind = 0, 0, length
    here = row
    parent = tl.load(parents + here)
    while parent != here:
        starts = _ends_with(start_marker, start_len, ids, parents, here, text, total)
        if starts & (has_start == 0):
            has_start, start = 1, behind - start_len
        ends = _ends_with(end_marker, end_len, ids, parents, here, text, total)
        if ends & (has_end == 0):
            has_end, end = 1, behind - end_len
        behind -= 1
        here = parent
        parent = tl.load(parents + here)
    if (start <= end) | (length - start - start_len < budget):
        return
    given = 0  # the tokens of the forced end that are already there
    for size in range(1, forced_len):
        if _ends_with(forced_end, size, ids, parents, row, text, total):
            given = size
    token = tl.load(forced_end + given)
    tl.store(logits + row.to(tl.int64) * logits_stride + token, 1.0e9)
