"""What the new tokens of a step teach: acceptance rates, and the n-grams that end in them."""

from typing import NamedTuple

import numpy as np

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
from lookahead_vllm.draft.growth.recycling import new_replaced, swap_lines
from lookahead_vllm.draft.growth.trees import find_all
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.progress import no_chains
from lookahead_vllm.draft.sources import ANSWERS, OWN
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, NUM_SUFFIXES, WHOLE, Hashes, advance
from lookahead_vllm.draft.trie.table import NO_SPACE, TrieArrays, count

MAX_TOKENS_LEARNED = 64
"""The most tokens of a step from which acceptance rates are learned, in about 0.1 ms. If there are
more, only every second token counts, or every third, and so on."""


class NewTokens(NamedTuple):
    """The new tokens of a step, and its texts before them, as arrays that are reused."""

    sizes: Int64s
    """int64 [3]: the number of TEXTS with new tokens, of their TOKENS, and of REPLACED lines."""
    rows: Int64s
    """int64 [capacity]: the row of each text among those of the live requests."""
    counts: Int64s
    """int64 [capacity]: the number of its new tokens."""
    hashes: Hashes
    """uint64 [capacity, NUM_HASHES]"""
    spaces: Int32s
    """int32 [capacity, NUM_SPACES]"""
    chains: Int32s
    """int32 [capacity, K, NUM_ALTERNATIVES, 2]: what a drafter had proposed."""
    tokens: Int32s
    """int32 [capacity]: of all texts, one text after another."""
    replaced: Int32s
    """int32 [capacity, 18]: what the model's choices in that step have replaced; see
    `new_replaced`."""


TEXTS, TOKENS, REPLACED = range(3)


def new_tokens(num_texts: int, num_tokens: int, chain_length: int) -> NewTokens:
    """Arrays for so many texts and tokens, without choices."""
    return NewTokens(
        np.zeros(3, np.int64),
        np.empty(num_texts, np.int64),
        np.empty(num_texts, np.int64),
        np.empty((num_texts, NUM_HASHES), np.uint64),
        np.empty((num_texts, NUM_SPACES), np.int32),
        no_chains(chain_length, num_texts),
        np.empty(num_tokens, np.int32),
        new_replaced(0),
    )


@kernel
def extend(trie: TrieArrays, lines: Int32s, new: NewTokens, learned: RateArrays) -> None:
    """Learn rates from the `new` tokens, and insert them.

    Meanwhile, it takes the model's new choices back, because the tokens were chosen from them.
    """
    trie, new, learned = TrieArrays(*trie), NewTokens(*new), RateArrays(*learned)
    num_texts, num_tokens = new.sizes[TEXTS], new.sizes[TOKENS]
    replaced = new.replaced[: new.sizes[REPLACED]]
    swap_lines(lines, replaced, True)
    hashes = np.empty(NUM_HASHES, np.uint64)
    lookups, ahead = new_lookups(), new_lookups()
    candidates, inputs = new_candidates(), new_inputs()
    learned_every = -(-num_tokens // MAX_TOKENS_LEARNED)
    end = 0
    for i in range(num_texts):
        spaces, chain = new.spaces[i], new.chains[i]
        place = 0
        first, end = end, end + new.counts[i]
        if i == 0:
            look_up(trie, spaces, new.hashes[i], ahead, NUM_SUFFIXES)
        for at in range(first, end):
            token = new.tokens[at]
            hashes[:] = new.hashes[i]
            advance(hashes, token, new.hashes[i])
            # The memory fetches what the next token needs while this one is learned.
            lookups, ahead = ahead, lookups
            then = i if at + 1 < end else min(i + 1, num_texts - 1)
            look_up(trie, new.spaces[then], new.hashes[then], ahead, NUM_SUFFIXES)
            match(trie.edges, spaces, lookups, NUM_SUFFIXES)
            if at % learned_every == 0:
                size = find_all(
                    trie, lines, spaces, hashes, chain, place, lookups, candidates, MAX_CANDIDATES
                )
                weights = weight_set(candidates.longest, spaces)
                learn_token(candidates.evidence, size, token, learned, weights, inputs)
            _insert(trie, spaces, lookups, token)
            place = follow_chain(chain, place, token)
    swap_lines(lines, replaced, False)
    new.sizes[REPLACED] = 0  # a step without choices replaces nothing


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
