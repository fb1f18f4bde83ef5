"""The compiled calls of a step: the tokens of the last one in, the trees of the next one out."""

from typing import Any, NamedTuple

import numpy as np

from lookahead_vllm.draft.budget.allot import allot
from lookahead_vllm.draft.budget.cost import StepPrices
from lookahead_vllm.draft.growth.acceptance_rate import (
    RateArrays,
    learn_token,
    new_inputs,
    weight_set,
)
from lookahead_vllm.draft.growth.candidates import (
    MAX_CANDIDATES,
    NUM_SPACES,
    Lookups,
    look_up,
    match,
    new_candidates,
    new_lookups,
)
from lookahead_vllm.draft.growth.chains import follow_chain
from lookahead_vllm.draft.growth.growers import SharedTrees, grow_all
from lookahead_vllm.draft.growth.recycling import ChoiceTrees, ModelChoices, recycle
from lookahead_vllm.draft.growth.trees import TextArrays, TreeLimits, find_all
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.progress import (
    GONE,
    NO_TEXT,
    EmittedTokens,
    ProgressArrays,
    WantedDrafts,
    count_tokens,
    limit_trees,
)
from lookahead_vllm.draft.sources import ANSWERS, OWN
from lookahead_vllm.draft.tree import ForestFields
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, NUM_SUFFIXES, WHOLE, Hashes, advance
from lookahead_vllm.draft.trie.table import NO_SPACE, TrieArrays, count

MAX_TOKENS_LEARNED = 64
"""The most tokens of a step from which acceptance rates are learned, in about 0.1 ms. If there are
more, only every second token counts, or every third, and so on."""

NewTokenFields = tuple[Int64s, Int32s, Int64s, Int64s]
Grown = tuple[ForestFields, float, float]
"""What `allot` returns."""


class NewTokens(NamedTuple):
    """The output tokens of a step."""

    rows: Int64s
    """int64 [t]: the row of each text."""
    tokens: Int32s
    """int32 [n]: the tokens of all texts, one text after another."""
    sizes: Int64s
    """int64 [t]: the number of tokens of each text."""
    live: Int64s
    """int64 [t]: the row of each text among those of the live requests, which may be another."""


@kernel
def extend(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    new: NewTokens,
    learned: RateArrays,
) -> None:
    """Learn rates from the `new` tokens, insert them, and move the texts on."""
    trie, texts, learned = TrieArrays(*trie), TextArrays(*texts), RateArrays(*learned)
    new = NewTokens(*new)
    hashes = np.empty(NUM_HASHES, np.uint64)
    lookups, ahead = new_lookups(), new_lookups()
    candidates, inputs = new_candidates(), new_inputs()
    learned_every = -(-len(new.tokens) // MAX_TOKENS_LEARNED)
    end = 0
    for i, row in enumerate(new.rows):
        spaces, chain = texts.spaces[row], texts.chains[row]
        place = 0
        first, end = end, end + new.sizes[i]
        if i == 0:
            look_up(trie, spaces, texts.hashes[row], ahead, NUM_SUFFIXES)
        for at in range(first, end):
            token = new.tokens[at]
            hashes[:] = texts.hashes[row]
            advance(hashes, token, texts.hashes[row])
            # The memory fetches what the next token needs while this one is learned.
            lookups, ahead = ahead, lookups
            then = row if at + 1 < end else new.rows[min(i + 1, len(new.rows) - 1)]
            look_up(trie, texts.spaces[then], texts.hashes[then], ahead, NUM_SUFFIXES)
            match(trie.edges, spaces, lookups, NUM_SUFFIXES)
            if at % learned_every == 0:
                size = find_all(
                    trie, lines, spaces, hashes, chain, place, lookups, candidates, MAX_CANDIDATES
                )
                weights = weight_set(candidates.longest, spaces)
                learn_token(candidates.evidence, size, token, learned, weights, inputs)
            _insert(trie, spaces, lookups, token)
            place = follow_chain(chain, place, token)


@borrowing_kernel
def _insert(trie: TrieArrays, spaces: Int32s, lookups: Lookups, token: int) -> None:
    """Insert a token after the suffixes that were looked up."""
    for source in (OWN, ANSWERS):
        if spaces[source] == NO_SPACE:
            continue
        for suffix in range(NUM_SUFFIXES):
            if source == OWN and suffix == WHOLE:
                continue
            key, slot = lookups.keys[source, suffix], lookups.slots[source, suffix]
            count(trie.edges, trie.live, trie.counters, key, slot, token)


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
) -> tuple[Int64s, tuple[Hashes, Int32s, Int32s], NewTokenFields, Int64s]:
    """Count the tokens of a step, and move the texts on by them and by a drafter's new chains.

    Returns the limits of the next trees; what `extend` needs to learn from the tokens: the texts
    that have new ones, as they were before, and the fields of NewTokens; and the known tokens of
    each wanted request, int64 [t], 0 if it does not decode. Fills `spans` as `count_tokens`.
    """
    progress, emitted = ProgressArrays(*progress), EmittedTokens(*emitted)
    wanted, texts = WantedDrafts(*wanted), TextArrays(*texts)
    count_tokens(progress, emitted, spans)
    sizes = spans[:, 1] - spans[:, 0]
    has_new = np.flatnonzero(sizes)
    hashes = np.empty((len(has_new), NUM_HASHES), np.uint64)
    spaces = np.empty((len(has_new), NUM_SPACES), np.int32)
    chains = np.empty((len(has_new), *texts.chains.shape[1:]), np.int32)
    live = np.empty(len(has_new), np.int64)
    tokens = np.empty(sizes.sum(), np.int32)
    next_hashes = np.empty(NUM_HASHES, np.uint64)
    size = 0
    for place, i in enumerate(has_new):
        live[place] = text = progress.texts[emitted.rows[i]]
        hashes[place], spaces[place] = texts.hashes[text], texts.spaces[text]
        chains[place] = texts.chains[text]
        for at in range(spans[i, 0], spans[i, 1]):
            tokens[size] = token = emitted.tokens[i, at]
            advance(texts.hashes[text], token, next_hashes)
            texts.hashes[text] = next_hashes
            size += 1
    follow_drafter(progress, emitted, texts)
    trees = limit_trees(progress, wanted, max_model_len)
    num_tokens = np.where(progress.is_decoding, progress.num_tokens, 0)[wanted.rows]
    new = np.arange(len(has_new)), tokens, sizes[has_new], live
    return trees, (hashes, spaces, chains), new, num_tokens


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
    plain_tokens: int,
    prices: StepPrices,
) -> tuple[Grown, tuple[Hashes, Int32s, Int32s], NewTokenFields, Int64s]:
    """`begin_step`, `grow_all` and `allot` in one call."""
    trees, before, new, num_tokens = begin_step(
        progress, emitted, spans, wanted, max_model_len, texts
    )
    forest = grow_all(trees, trie, lines, texts, learned, limits, shared)
    return allot(forest, plain_tokens, prices), before, new, num_tokens


@kernel
def begin_recycle_and_grow(
    trees: ChoiceTrees, choices: ModelChoices, lines: Int32s, *rest: Any
) -> tuple[Grown, tuple[Hashes, Int32s, Int32s], NewTokenFields, Int64s, Int32s]:
    """As `begin_and_grow`, whose arguments are the `rest`, with new `choices` of the model; also
    returns what `recycle` does."""
    replaced = recycle(lines, trees, choices)
    grown, before, new, num_tokens = begin_and_grow(*rest)
    return grown, before, new, num_tokens, replaced
