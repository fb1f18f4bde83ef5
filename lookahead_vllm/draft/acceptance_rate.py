"""How often a continuation with such evidence was what the model really said.

A raw frequency is far too sure of itself: what followed once, followed always. So every token that
the model emits is a trial for all that the tries would have put in its place, drafted or not, and
evidence of a kind is believed as often as it was right. Nothing has to be explored for that.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead_vllm.draft.continuation import MAX_CONTINUATIONS, find_continuations, num_buckets
from lookahead_vllm.draft.trie import Ints, Nodes, Trie, advance, match_suffixes

Rates = NDArray[np.float64]

PRIOR_HITS, PRIOR_TRIALS = 0.9, 6.0
MEMORY = 400.0  # trials of one kind at which the old ones count half


class AcceptanceRate:
    """Hits and trials of every kind of evidence, learned on line.

    Attributes
    ----------
    rates : float64 [num_buckets, 2]
        Hits and trials, prior included; their quotient is the probability, always below 1.
    """

    def __init__(self, max_suffix: int, prompt_weight: float) -> None:
        self.max_suffix = max_suffix
        self.prompt_weight = prompt_weight
        self.rates: Rates = np.empty((num_buckets(max_suffix), 2))
        self.rates[:] = PRIOR_HITS, PRIOR_TRIALS

    def learn(self, own: Trie, answers: Trie, tokens: Ints, num_context: int) -> None:
        """Learn from `tokens[num_context:]`, what the model said after `tokens[:num_context]`.

        Call it before the tokens are inserted into the tries: what was known beforehand is judged.
        """
        arena = own.arena
        _learn(
            arena.nodes,
            arena.edges,
            own.root,
            answers.root,
            tokens,
            num_context,
            self.max_suffix,
            self.prompt_weight,
            self.rates,
        )


@njit(cache=True)
def _record(rates: Rates, bucket: int, hit: bool) -> None:
    if hit:
        rates[bucket, 0] += 1
    rates[bucket, 1] += 1
    if rates[bucket, 1] > MEMORY:
        rates[bucket] *= 0.5


@njit(cache=True)
def _learn(
    nodes: Nodes,
    edges: Ints,
    own_root: int,
    answers_root: int,
    tokens: Ints,
    num_context: int,
    max_suffix: int,
    prompt_weight: float,
    rates: Rates,
) -> None:
    candidates = np.empty(MAX_CONTINUATIONS, np.int32)
    buckets = np.empty(MAX_CONTINUATIONS, np.int32)
    own, own_next = np.empty((2, max_suffix + 1), np.int32)
    answers, answers_next = np.empty((2, max_suffix + 1), np.int32)
    match_suffixes(nodes, edges, own_root, tokens[:num_context], own)
    match_suffixes(nodes, edges, answers_root, tokens[:num_context], answers)
    for said in tokens[num_context:]:
        found = find_continuations(nodes, edges, own, answers, prompt_weight, candidates, buckets)
        for i in range(found):
            _record(rates, buckets[i], candidates[i] == said)
        advance(nodes, edges, own, said, own_next)
        advance(nodes, edges, answers, said, answers_next)
        own, own_next = own_next, own
        answers, answers_next = answers_next, answers
