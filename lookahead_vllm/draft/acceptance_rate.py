"""How likely a continuation is what the model says next: learned, from what it really said.

A raw frequency is far too sure of itself: what followed once, followed always. So every token that
the model emits is a trial for all that could have been drafted in its place, drafted or not, and
evidence of a kind is believed as often as it was right. Nothing has to be explored for that.

Several rates judge one continuation: by the evidence in each source, by that of both together,
by the token itself, by sparse contexts. A logistic mixer weighs them, with weights of its own for
every pair of longest matches: the weighted sum of their log odds is the log odds of the
continuation. Source: secondary estimation in PPMd (Shkarin 2002), mixing in PAQ (Mahoney 2005).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead_vllm.draft.continuation import (
    ANSWERS,
    COARSE,
    MAX_CONTINUATIONS,
    NUM_COARSE,
    NUM_COLUMNS,
    NUM_KINDS,
    NUM_SOURCES,
    NUM_SPARSE_KINDS,
    OWN,
    REFERENCE,
    SPARSE_OWN,
    find_continuations,
)
from lookahead_vllm.draft.suffix import ORDERS, Hashes
from lookahead_vllm.draft.trie import NOWHERE, Ints

Rates = NDArray[np.float32]
Weights = NDArray[np.float32]

# Columns of a rate.
LOG_ODDS, HITS, TRIALS = range(3)

PRIOR_RATE, PRIOR_TRIALS = 0.15, 4.0
REFERENCE_RATE = 0.7  # who gives a text to copy knows why
BASE_LOG_ODDS = math.log(0.12 / 0.88)  # of any continuation: counted once where two sources agree
NARROW_TRIALS = 2.0  # trials that a rate is worth before its first, where it starts from a guess
MEMORY = 400.0  # trials of one kind at which the old ones count half
LEARNING_RATE = 0.01  # of the weights
LEAST, MOST = 0.002, 0.995  # the range of a probability
HOPELESS = 0.003  # what is less likely is not worth the time of learning from it

_TOKENS, _LEVELS = 1024, 16  # token hashes, and steps of log odds, that have a rate of their own

# Inputs of the mixer: a rate each, and a constant.
_PAIR, _TOKEN, _BIAS = 3, 4, 7
_SPARSE = 5  # and 6
NUM_INPUTS = 8
_FIRST_WEIGHTS = (0.2, 0.2, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0)
_BIAS_INPUT = 0.4

# Where each input's rates begin.
_STARTS = np.cumsum(
    [
        0,
        NUM_KINDS,
        NUM_KINDS,
        NUM_KINDS,
        NUM_COARSE**2,
        _TOKENS * _LEVELS,
        NUM_SPARSE_KINDS * _LEVELS,
        NUM_SPARSE_KINDS * _LEVELS,
    ]
)
_SETS = len(ORDERS) + 1


class AcceptanceRate:
    """What was learned so far: the rates and how to mix them.

    Attributes
    ----------
    rates : float32 [num_rates, 4]
        LOG_ODDS, HITS and TRIALS, priors included. A rate without a trial is worth a guess.
    weights : float32 [num_sets, NUM_INPUTS]
        The mixer's, by the longest matches in the request's own text and in other answers.
    """

    def __init__(self) -> None:
        self.rates: Rates = np.zeros((int(_STARTS[-1]), 4), np.float32)
        for source, rate in ((OWN, PRIOR_RATE), (ANSWERS, PRIOR_RATE), (REFERENCE, REFERENCE_RATE)):
            kinds = self.rates[_STARTS[source] : _STARTS[source + 1]]
            kinds[:] = math.log(rate / (1 - rate)), rate * PRIOR_TRIALS, PRIOR_TRIALS, 0
        self.weights: Weights = np.tile(
            np.array(_FIRST_WEIGHTS, np.float32), (2 * _SETS * _SETS, 1)
        )


@njit(cache=True)
def _squash(log_odds: float) -> float:
    return min(max(1.0 / (1.0 + math.exp(-log_odds)), LEAST), MOST)


@njit(cache=True)
def weight_set(longest: Ints, spaces: Ints) -> int:
    """Which weights a text's continuations are judged by, all of them."""
    has_reference = np.int64(spaces[REFERENCE] != NOWHERE)
    return (has_reference * _SETS + longest[OWN]) * _SETS + longest[ANSWERS]


@njit(cache=True)
def judge(
    token: int, kinds: Ints, rates: Rates, weights: Weights, which: Ints, inputs: Rates
) -> float:
    """The probability that `token` comes next, by its evidence `kinds` int32 [NUM_COLUMNS].

    `weights` is float32 [NUM_INPUTS], one set. Fills `which` int32 [NUM_INPUTS] with the rates
    that were asked and `inputs` float32 [NUM_INPUTS] with their log odds.
    """
    for source in range(NUM_SOURCES):
        which[source] = _STARTS[source] + kinds[source]
        inputs[source] = rates[which[source], LOG_ODDS]
    if kinds[REFERENCE] == 0:
        inputs[REFERENCE] = 0
    # Both sources together; a pair that was never tried is as good as both say it is.
    pair = COARSE[kinds[OWN]] * NUM_COARSE + COARSE[kinds[ANSWERS]]
    guess = inputs[OWN] + inputs[ANSWERS] - np.float32(BASE_LOG_ODDS)
    which[_PAIR] = _STARTS[_PAIR] + pair
    inputs[_PAIR] = guess = _learned_or(rates, which[_PAIR], min(max(guess, -5.8), 3.5))
    level = min(max(np.int64(guess + 8), 0), _LEVELS - 1)
    hashed = (np.int64(token) * 2654435761 >> 7) & (_TOKENS - 1)
    which[_TOKEN] = _STARTS[_TOKEN] + hashed * _LEVELS + level
    inputs[_TOKEN] = _learned_or(rates, which[_TOKEN], guess)
    for i in range(2):
        kind = kinds[SPARSE_OWN + i]
        which[_SPARSE + i] = _STARTS[_SPARSE + i] + kind * _LEVELS + level
        inputs[_SPARSE + i] = _learned_or(rates, which[_SPARSE + i], guess)
    inputs[_BIAS] = _BIAS_INPUT
    log_odds = np.float32(0)
    for i in range(NUM_INPUTS):
        log_odds += weights[i] * inputs[i]
    return _squash(log_odds)


@njit(cache=True)
def _learned_or(rates: Rates, rate: int, guess: float) -> np.float32:
    return rates[rate, LOG_ODDS] if rates[rate, TRIALS] > 0 else np.float32(guess)


@njit(cache=True)
def _record(rates: Rates, rate: int, said: bool, guess: float, prior_trials: float) -> None:
    hits, trials = rates[rate, HITS], rates[rate, TRIALS]
    if trials == 0:
        hits, trials = prior_trials / (1 + math.exp(-guess)), prior_trials
    if said:
        hits += 1
    trials += 1
    if trials > MEMORY:
        hits, trials = hits / 2, trials / 2
    rates[rate, HITS], rates[rate, TRIALS] = hits, trials
    share = min(max(hits / trials, 0.0005), 0.999)
    rates[rate, LOG_ODDS] = math.log(share / (1 - share))


@njit(cache=True)
def learn_token(
    edges: Ints, live: Ints, spaces: Ints, row: Hashes, said: int, rates: Rates, weights: Weights
) -> None:
    """The model said `said` after the text of `row`: a trial for every continuation of it.

    Call it before the token is inserted: what was known beforehand is judged.
    """
    tokens = np.empty(MAX_CONTINUATIONS, np.int32)
    kinds = np.empty((MAX_CONTINUATIONS, NUM_COLUMNS), np.int32)
    longest = np.empty(NUM_SOURCES, np.int32)
    which = np.empty(NUM_INPUTS, np.int32)
    inputs = np.empty(NUM_INPUTS, np.float32)
    found = find_continuations(edges, live, spaces, row, tokens, kinds, longest)
    chosen = weights[weight_set(longest, spaces)]
    for i in range(found):
        hit = tokens[i] == said
        prob = judge(tokens[i], kinds[i], rates, chosen, which, inputs)
        if prob < HOPELESS:
            continue
        error = np.float32((1.0 if hit else 0.0) - prob)
        for source in range(NUM_SOURCES):
            if source < REFERENCE or kinds[i, REFERENCE]:
                _record(rates, which[source], hit, 0.0, PRIOR_TRIALS)
        guess = inputs[OWN] + inputs[ANSWERS] - BASE_LOG_ODDS
        _record(rates, which[_PAIR], hit, min(max(guess, -5.8), 3.5), PRIOR_TRIALS)
        _record(rates, which[_TOKEN], hit, inputs[_PAIR], NARROW_TRIALS)
        for sparse in range(_SPARSE, _SPARSE + 2):
            _record(rates, which[sparse], hit, inputs[_PAIR], NARROW_TRIALS)
        for j in range(NUM_INPUTS):
            chosen[j] += np.float32(LEARNING_RATE) * error * inputs[j]
