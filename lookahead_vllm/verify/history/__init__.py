"""Sampling parameters that depend on a request's output, applied at the nodes of a tree.

The history of a logits row is the request's text followed by the path from the first node to the
row. vLLM's Model Runner V2 treats the rows before a row as its history, which is right only for
chains (`vllm/v1/worker/gpu/sample/{penalties,bad_words,thinking_budget}.py`). These functions
follow parents instead. On a chain they give the same logits, bit by bit.

All change float32 logits [n, vocabulary] in place, without a synchronisation on a GPU. As in vLLM,
tensors of the state have a row for each request slot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lookahead_vllm.verify.devices import module_for


class Histories(NamedTuple):
    """The rows of a step's logits, all on the device of the logits."""

    slots: Tensor
    """int32 or int64 [n]: the request slot of each row."""
    ids: Tensor
    """int32 or int64 [n]: the token of each row; a root's is the last committed token."""
    parents: Tensor
    """int32 [n]: the row of each row's parent, before the row itself; a root is its own."""


class Texts(NamedTuple):
    """The committed text of the request in each slot, without the nodes of the step."""

    token_ids: Tensor
    """int32 [slots, longest]"""
    prompt_lens: Tensor
    """int32 [slots]"""
    total_lens: Tensor
    """int32 [slots]: prompt and output."""


class Penalties(NamedTuple):
    """The penalties of each slot, and the tokens that they apply to."""

    repetition: Tensor
    """float32 [slots]; 1 for none."""
    frequency: Tensor
    """float32 [slots]; 0 for none."""
    presence: Tensor
    """float32 [slots]; 0 for none."""
    prompt_mask: Tensor
    """int32 [slots, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set if the prompt has
    token t."""
    output_counts: Tensor
    """int32 [slots, vocabulary]: how often the output has each token."""


class BadWords(NamedTuple):
    """The bad words of each slot. The last token of a word is excluded after its first tokens."""

    token_ids: Tensor
    """int32 [slots, most tokens]: the words of a slot, concatenated."""
    offsets: Tensor
    """int32 [slots, most words + 1]: the first token of each word, then the end."""
    counts: Tensor
    """int32 [slots]: the number of words."""


class ThinkingBudgets(NamedTuple):
    """The thinking budget of each slot, and where thinking starts and ends in its text."""

    budgets: Tensor
    """int32 [slots]: tokens; -1 for none."""
    last_start: Tensor
    """int32 [slots]: where the last start marker begins, or -1; updated."""
    last_end: Tensor
    """int32 [slots]: where the last end marker begins, or -1; updated. Exact only if it is after
    `last_start`."""
    scanned: Tensor
    """int32 [slots]: all markers that begin before this position have been found; updated."""
    start_marker: Tensor
    """int32 [a]: the tokens that start thinking."""
    end_marker: Tensor
    """int32 [b]: the tokens that end it."""
    forced_end: Tensor
    """int32 [c]: the tokens that are forced when the budget is used up."""


def apply_penalties(logits: Tensor, rows: Histories, penalties: Penalties) -> None:
    """Apply repetition, frequency and presence penalties, in this order."""
    _check(logits, rows)
    module_for("history", logits.device).apply_penalties(logits, rows, penalties)


def apply_bad_words(
    logits: Tensor, rows: Histories, texts: Texts, words: BadWords, max_words: int
) -> None:
    """Set the logit of a bad word's last token to -inf if the history ends with its other tokens.

    Only output counts as history here, not the prompt. No request has more than `max_words`.
    """
    _check(logits, rows)
    module_for("history", logits.device).apply_bad_words(logits, rows, texts, words, max_words)


def apply_thinking_budgets(
    logits: Tensor, rows: Histories, slots: Tensor, texts: Texts, thinking: ThinkingBudgets
) -> None:
    """Force the next token of the end marker, with a logit of 1e9, where a budget is used up.

    First updates `last_start`, `last_end` and `scanned` from the text that was committed since.
    `slots`, int32 or int64 [r], are those of the step's requests.
    """
    _check(logits, rows)
    module_for("history", logits.device).apply_thinking_budgets(
        logits, rows, slots, texts, thinking
    )


def _check(logits: Tensor, rows: Histories) -> None:
    assert logits.dtype == torch.float32 and logits.ndim == 2 and logits.stride(1) == 1
    assert all(part.shape == logits.shape[:1] for part in rows), [part.shape for part in rows]
    assert rows.parents.dtype == torch.int32
