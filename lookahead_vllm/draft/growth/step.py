"""The compiled calls of a step: the tokens of the last one in, the trees of the next one out."""

from typing import Any

import numpy as np

from lookahead_vllm.draft.budget.allot import allot
from lookahead_vllm.draft.budget.cost import StepPrices
from lookahead_vllm.draft.growth.acceptance_rate import RateArrays
from lookahead_vllm.draft.growth.growers import SharedTrees, grow_all
from lookahead_vllm.draft.growth.learning import TEXTS, TOKENS, NewTokens
from lookahead_vllm.draft.growth.recycling import ChoiceTrees, ModelChoices, keep_choices
from lookahead_vllm.draft.growth.trees import TextArrays, TreeLimits
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.progress import (
    GONE,
    NO_TEXT,
    EmittedTokens,
    ProgressArrays,
    WantedDrafts,
    count_tokens,
    limit_trees,
)
from lookahead_vllm.draft.tree import ForestFields
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, advance
from lookahead_vllm.draft.trie.table import TrieArrays

Grown = tuple[ForestFields, float, float]
"""What `allot` returns."""


@kernel
def follow_drafter(progress: ProgressArrays, emitted: EmittedTokens, texts: TextArrays) -> None:
    """Give the texts of a step's requests the chains that a drafter proposes after its tokens."""
    if emitted.chains.shape[1] == 0:
        return
    for i, row in enumerate(emitted.rows):
        if row != GONE and progress.texts[row] != NO_TEXT:
            texts.chains[progress.texts[row]] = emitted.chains[i]


@kernel
def begin_step(
    progress: ProgressArrays,
    emitted: EmittedTokens,
    spans: Int64s,
    wanted: WantedDrafts,
    max_model_len: int,
    texts: TextArrays,
    new: NewTokens,
) -> tuple[Int64s, Int64s]:
    """Count the tokens of a step, and move the texts on by them and by a drafter's new chains.

    Returns the limits of the next trees, and the known tokens of each wanted request, int64 [t], 0
    if it does not decode. Fills `spans` as `count_tokens`, and `new` for `extend`. IndexError if
    `new` has no room for the tokens.
    """
    progress, emitted = ProgressArrays(*progress), EmittedTokens(*emitted)
    wanted, texts, new = WantedDrafts(*wanted), TextArrays(*texts), NewTokens(*new)
    count_tokens(progress, emitted, spans)
    has_new = np.flatnonzero(spans[:, 1] - spans[:, 0])
    if len(has_new) > len(new.rows) or emitted.tokens.size > len(new.tokens):
        raise IndexError("there is no room for the tokens")
    next_hashes = np.empty(NUM_HASHES, np.uint64)
    size = 0
    for place, i in enumerate(has_new):
        new.rows[place] = text = progress.texts[emitted.rows[i]]
        new.counts[place] = spans[i, 1] - spans[i, 0]
        new.hashes[place], new.spaces[place] = texts.hashes[text], texts.spaces[text]
        new.chains[place] = texts.chains[text]
        for at in range(spans[i, 0], spans[i, 1]):
            new.tokens[size] = token = emitted.tokens[i, at]
            advance(texts.hashes[text], token, next_hashes)
            texts.hashes[text] = next_hashes
            size += 1
    new.sizes[TEXTS], new.sizes[TOKENS] = len(has_new), size
    follow_drafter(progress, emitted, texts)
    trees = limit_trees(progress, wanted, max_model_len)
    return trees, np.where(progress.is_decoding, progress.num_tokens, 0)[wanted.rows]


@kernel
def begin_and_grow(
    progress: ProgressArrays,
    emitted: EmittedTokens,
    spans: Int64s,
    wanted: WantedDrafts,
    max_model_len: int,
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    learned: RateArrays,
    limits: TreeLimits,
    shared: SharedTrees,
    new: NewTokens,
    plain_tokens: int,
    prices: StepPrices,
) -> tuple[Grown, Int64s]:
    """`begin_step`, `grow_all` and `allot` in one call; returns what the last one does, and the
    known tokens."""
    trees, num_tokens = begin_step(progress, emitted, spans, wanted, max_model_len, texts, new)
    forest = grow_all(trees, trie, lines, texts, learned, limits, shared)
    return allot(forest, plain_tokens, prices), num_tokens


@kernel
def keep_choices_and_grow(
    trees: ChoiceTrees, choices: ModelChoices, lines: Int32s, replaced: Int32s, *rest: Any
) -> tuple[Grown, Int64s]:
    """`keep_choices`, and `begin_and_grow`, whose arguments are the `rest`, in one call."""
    keep_choices(lines, trees, choices, replaced)
    return begin_and_grow(*rest)
