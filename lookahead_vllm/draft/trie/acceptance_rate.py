"""How likely a continuation is what the model says next: learned, from what it really said.

A raw frequency is far too sure of itself: what followed once, followed always. So every token that
the model emits is a trial for all that could have been drafted in its place, drafted or not, and
evidence of a kind is believed as often as it was right. Nothing has to be explored for that.

Several rates judge one continuation: by the evidence in each source, by that of both together,
by what both together come to, by sparse contexts. None of them is of a token or a text: rates are
shared by all namespaces and must not tell one what another's texts hold. A logistic mixer weighs
them, with weights of its own for every pair of longest matches: the weighted sum of their log odds
is the log odds of the continuation. Source: secondary estimation in PPMd (Shkarin 2002), mixing in
PAQ (Mahoney 2005).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, kernel
from lookahead_vllm.draft.sources import ANSWERS, OWN, REFERENCE
from lookahead_vllm.draft.trie.candidates import (
    CHOICES,
    CHOSEN,
    COARSE,
    NUM_COARSE_KINDS,
    NUM_KINDS,
    NUM_SOURCES,
    NUM_SPARSE_KINDS,
    SPARSE_ANSWERS,
    SPARSE_OWN,
    TOKEN,
)
from lookahead_vllm.draft.trie.recycling import NUM_CHOICE_KINDS, NUM_LENGTHS, first_rates
from lookahead_vllm.draft.trie.suffix import ORDERS
from lookahead_vllm.draft.trie.table import NO_SPACE

Rates = NDArray[np.float32]
Weights = NDArray[np.float32]

# Columns of `AcceptanceRate.trials`.
HITS, TRIALS = range(2)

_float = np.float32  # all arithmetic is in single precision

PRIOR_RATE, PRIOR_TRIALS = 0.15, _float(4)
REFERENCE_RATE = 0.7  # who gives a text to copy knows why
BASE_LOG_ODDS = _float(math.log(0.12 / 0.88))  # of any: counted once where two sources agree
NARROW_TRIALS = _float(2)  # what a guess is worth where a rate begins with one
MEMORY = _float(400)  # trials of one kind at which the old ones count half
LEARNING_RATE = _float(0.01)  # of the weights
LEAST, MOST = _float(0.002), _float(0.995)  # the range of a probability
MIN_JUDGED_PROBABILITY = 0.005  # what is less likely is not worth the time of learning from it

_LEVELS = 16  # steps of log odds that have a rate of their own

_ONE = _float(1)
_LEAST_SHARE, _MOST_SHARE = _float(0.0005), _float(0.999)
_LEAST_GUESS, _MOST_GUESS = _float(-5.8), _float(3.5)

# Inputs of the mixer: a rate each, and a constant.
_PAIR, _LEVEL, _SPARSE, _CHOICE, _CHOICE_LEVEL, _BIAS = range(NUM_SOURCES, NUM_SOURCES + 6)
NUM_INPUTS = _BIAS + 1
_FIRST_WEIGHTS = (0.2, 0.2, 0.6, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0)
_FIRST_WEIGHTS_WITH_CHOICES = (0.1, 0.1, 0.6, 0.1, 0.1, 0.1, 0.4, 0.4, 0.0)
_BIAS_INPUT = _float(0.4)

# Where each input's rates begin.
_STARTS = np.cumsum(
    [
        0,
        NUM_KINDS,
        NUM_KINDS,
        NUM_KINDS,
        NUM_COARSE_KINDS**2,
        _LEVELS,
        NUM_SPARSE_KINDS**2 * _LEVELS,
        NUM_CHOICE_KINDS,
        NUM_CHOICE_KINDS * _LEVELS,
    ]
)
_SETS = len(ORDERS) + 1
_CHOICE_SETS = NUM_LENGTHS + 1


class AcceptanceRate:
    """What was learned so far: the rates and how to mix them.

    Attributes
    ----------
    rates : float32 [num_rates]
        Log odds; NaN where there was no trial, and then a guess has to do.
    trials : float32 [num_rates, 2]
        HITS and TRIALS, priors included.
    weights : float32 [num_sets, NUM_INPUTS]
        The mixer's, by the longest matches in the request's own text, in other answers, and
        among the model's choices.
    """

    def __init__(self) -> None:
        self.rates: Rates = np.full(int(_STARTS[-1]), np.nan, np.float32)
        self.trials: Rates = np.zeros((len(self.rates), 2), np.float32)
        for source, rate in ((OWN, PRIOR_RATE), (ANSWERS, PRIOR_RATE), (REFERENCE, REFERENCE_RATE)):
            kinds = slice(_STARTS[source], _STARTS[source + 1])
            self.rates[kinds] = math.log(rate / (1 - rate))
            self.trials[kinds] = rate * PRIOR_TRIALS, PRIOR_TRIALS
        kinds = slice(_STARTS[_CHOICE], _STARTS[_CHOICE_LEVEL])
        rates = first_rates()
        self.rates[kinds] = np.log(rates / (1 - rates))
        self.trials[kinds] = np.stack([rates * PRIOR_TRIALS, np.full_like(rates, PRIOR_TRIALS)], 1)
        weights = [_FIRST_WEIGHTS, *[_FIRST_WEIGHTS_WITH_CHOICES] * NUM_LENGTHS]
        self.weights: Weights = np.tile(np.array(weights, np.float32), (2 * _SETS * _SETS, 1))

    @property
    def num_bytes(self) -> int:
        return self.rates.nbytes + self.trials.nbytes + self.weights.nbytes


@kernel
def _squash(log_odds: np.float32) -> np.float32:
    return _ONE / (_ONE + math.exp(-log_odds))


@kernel
def weight_set(longest: Int32s, spaces: Int32s) -> int:
    """Which weights a text's continuations are judged by, all of them."""
    has_reference = np.int64(spaces[REFERENCE] != NO_SPACE)
    in_trie = (has_reference * _SETS + longest[OWN]) * _SETS + longest[ANSWERS]
    return in_trie * _CHOICE_SETS + longest[CHOICES]


@kernel
def judging_scratch() -> tuple[Int32s, Rates]:
    """`which` and `inputs` for `judge`, to be used again and again."""
    return np.empty(NUM_INPUTS, np.int32), np.empty(NUM_INPUTS, np.float32)


@kernel
def judge(
    found: Int32s,
    i: int,
    rates: Rates,
    weights: Weights,
    chosen: int,
    which: Int32s,
    inputs: Rates,
) -> np.float32:
    """The probability that the continuation in row `i` of `found` is what the model says.

    `chosen` is the set of weights. Fills `which` int32 [NUM_INPUTS] with the rates that were
    asked and `inputs` float32 [NUM_INPUTS] with their log odds.
    """
    own, answers, reference = found[i, OWN], found[i, ANSWERS], found[i, REFERENCE]
    which[OWN] = _STARTS[OWN] + own
    which[ANSWERS] = _STARTS[ANSWERS] + answers
    which[REFERENCE] = _STARTS[REFERENCE] + reference
    own_odds = rates[which[OWN]]
    answers_odds = rates[which[ANSWERS]]
    reference_odds = rates[which[REFERENCE]] if reference else _float(0)
    # Both sources together; a pair that was never tried is as good as both say it is.
    which[_PAIR] = _STARTS[_PAIR] + COARSE[own] * NUM_COARSE_KINDS + COARSE[answers]
    guess = _learned_or(rates, which[_PAIR], _guess(own_odds, answers_odds))
    level = min(max(np.int32(guess + 8), 0), _LEVELS - 1)
    which[_LEVEL] = _STARTS[_LEVEL] + level
    sparse = found[i, SPARSE_OWN] * NUM_SPARSE_KINDS + found[i, SPARSE_ANSWERS]
    which[_SPARSE] = _STARTS[_SPARSE] + sparse * _LEVELS + level
    choice = found[i, CHOSEN]
    which[_CHOICE] = _STARTS[_CHOICE] + choice
    which[_CHOICE_LEVEL] = _STARTS[_CHOICE_LEVEL] + choice * _LEVELS + level
    inputs[_CHOICE] = rates[which[_CHOICE]] if choice else _float(0)
    inputs[_CHOICE_LEVEL] = (
        _learned_or(rates, which[_CHOICE_LEVEL], inputs[_CHOICE]) if choice else _float(0)
    )
    inputs[OWN] = own_odds
    inputs[ANSWERS] = answers_odds
    inputs[REFERENCE] = reference_odds
    inputs[_PAIR] = guess
    inputs[_LEVEL] = _learned_or(rates, which[_LEVEL], guess)
    inputs[_SPARSE] = _learned_or(rates, which[_SPARSE], guess)
    inputs[_BIAS] = _BIAS_INPUT
    log_odds = _float(0)
    for j in range(NUM_INPUTS):
        log_odds += weights[chosen, j] * inputs[j]
    return min(max(_squash(log_odds), LEAST), MOST)


@kernel
def _guess(own_odds: np.float32, answers_odds: np.float32) -> np.float32:
    return min(max(own_odds + answers_odds - BASE_LOG_ODDS, _LEAST_GUESS), _MOST_GUESS)


@kernel
def _learned_or(rates: Rates, rate: int, guess: np.float32) -> np.float32:
    return guess if math.isnan(rates[rate]) else rates[rate]


@kernel
def _record(
    rates: Rates,
    trials: Rates,
    rate: int,
    said: np.float32,
    guess: np.float32,
    prior_trials: np.float32,
) -> None:
    hits, tried = trials[rate, HITS], trials[rate, TRIALS]
    if tried == 0:
        hits, tried = prior_trials * _squash(guess), prior_trials
    hits += said
    tried += _ONE
    if tried > MEMORY:
        hits, tried = hits * _float(0.5), tried * _float(0.5)
    trials[rate, HITS], trials[rate, TRIALS] = hits, tried
    share = min(max(hits / tried, _LEAST_SHARE), _MOST_SHARE)
    rates[rate] = math.log(share / (_ONE - share))


@kernel
def learn_token(
    found: Int32s,
    num_found: int,
    said: int,
    rates: Rates,
    trials: Rates,
    weights: Weights,
    chosen: int,
    which: Int32s,
    inputs: Rates,
) -> None:
    """The model said `said`: a trial for every continuation that was found before it was."""
    for i in range(num_found):
        prob = judge(found, i, rates, weights, chosen, which, inputs)
        if prob < MIN_JUDGED_PROBABILITY:
            continue
        hit = _float(found[i, TOKEN] == said)
        _record(rates, trials, which[OWN], hit, inputs[OWN], PRIOR_TRIALS)
        _record(rates, trials, which[ANSWERS], hit, inputs[ANSWERS], PRIOR_TRIALS)
        if found[i, REFERENCE]:
            _record(rates, trials, which[REFERENCE], hit, inputs[REFERENCE], PRIOR_TRIALS)
        _record(
            rates, trials, which[_PAIR], hit, _guess(inputs[OWN], inputs[ANSWERS]), PRIOR_TRIALS
        )
        for narrow in (_LEVEL, _SPARSE):
            _record(rates, trials, which[narrow], hit, inputs[_PAIR], NARROW_TRIALS)
        if found[i, CHOSEN]:
            _record(rates, trials, which[_CHOICE], hit, inputs[_CHOICE], PRIOR_TRIALS)
            _record(rates, trials, which[_CHOICE_LEVEL], hit, inputs[_CHOICE], NARROW_TRIALS)
        for j in range(NUM_INPUTS):
            weights[chosen, j] += LEARNING_RATE * (hit - prob) * inputs[j]
