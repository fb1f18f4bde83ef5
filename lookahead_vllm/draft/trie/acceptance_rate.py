"""The learned acceptance rate of a candidate: how likely the model's next token is this one.

Raw frequencies overestimate: what followed a suffix once has followed it always. So every token
that the model emits is a trial for all candidates in its place, drafted or not, and the rate of a
kind of evidence is the share of its trials that were hits. This needs no exploration.

Several rates apply to one candidate: of the evidence in each source, of both sources together, of
the level of their combined log odds, and of sparse contexts. No rate belongs to a token or a text:
all namespaces share the rates, which must not reveal what another namespace's texts contain. A
logistic mixer combines them: the log odds of the candidate are the weighted sum of the rates' log
odds, with separate weights for every pair of longest matches. Source: secondary estimation in PPMd
(Shkarin 2002), mixing in PAQ (Mahoney 2005).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, kernel
from lookahead_vllm.draft.sources import ANSWERS, OWN, REFERENCE
from lookahead_vllm.draft.trie import priors
from lookahead_vllm.draft.trie.candidates import (
    CHOICES,
    CHOSEN,
    COARSE_KINDS,
    NUM_COARSE_KINDS,
    NUM_KINDS,
    NUM_SOURCES,
    NUM_SPARSE_KINDS,
    SPARSE_ANSWERS,
    SPARSE_OWN,
    TOKEN,
)
from lookahead_vllm.draft.trie.priors import Priors
from lookahead_vllm.draft.trie.recycling import NUM_CHOICE_KINDS, NUM_LENGTHS, initial_rates
from lookahead_vllm.draft.trie.suffix import ORDERS
from lookahead_vllm.draft.trie.table import NO_SPACE

Float32s = NDArray[np.float32]

# Columns of `AcceptanceRate.trials`.
HITS, TRIALS = range(2)

_float = np.float32  # all arithmetic is in single precision

PRIOR_RATE, PRIOR_TRIALS = 0.15, _float(4)  # a rate's initial value, and the trials it counts for
REFERENCE_RATE = 0.7  # a reference's initial rate: the answer is likely to copy it
BASE_LOG_ODDS = _float(math.log(0.12 / 0.88))  # any candidate's log odds; subtracted in `_sum`
NARROW_TRIALS = _float(2)  # prior trials of a rate that starts from the value of a wider one
MEMORY_TRIALS = _float(400)  # beyond this many trials of a rate, all its trials are halved
LEARNING_RATE = _float(0.01)  # the step size of the mixer's weights
MIN_ESTIMATE, MAX_ESTIMATE = _float(0.002), _float(0.995)  # bounds of a candidate's probability
MAX_WEIGHT = _float(4)  # of the mixer; larger ones would make a candidate's probability 0 or 1
MIN_LEARNED_PROBABILITY = 0.005  # less likely candidates are not learned from, to save time

_LEVELS = 16  # the number of classes of log odds, each with a rate of its own

_ONE = _float(1)
_MIN_SHARE, _MAX_SHARE = _float(0.0005), _float(0.999)  # bounds of the share of hits in trials
_MIN_SUM, _MAX_SUM = _float(-5.8), _float(3.5)  # bounds of the sum of two sources' log odds

# Inputs of the mixer: the log odds of a rate each, and a constant.
_PAIR, _LEVEL, _SPARSE, _CHOICE, _CHOICE_LEVEL, _BIAS = range(NUM_SOURCES, NUM_SOURCES + 6)
NUM_INPUTS = _BIAS + 1
_INITIAL_WEIGHTS = (0.2, 0.2, 0.6, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0)
_INITIAL_WEIGHTS_WITH_CHOICES = (0.1, 0.1, 0.6, 0.1, 0.1, 0.1, 0.4, 0.4, 0.0)
_BIAS_INPUT = _float(0.4)

# The index of each input's first rate.
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


NUM_RATES = int(_STARTS[-1])


class RateArrays(NamedTuple):
    """The arrays of an `AcceptanceRate`, as the kernels take them."""

    rates: Float32s
    trials: Float32s
    weights: Float32s


class MixerInputs(NamedTuple):
    """The inputs of the mixer for one candidate, as arrays that are reused for every candidate."""

    indices: Int32s
    """int32 [NUM_INPUTS]: the index of each input's rate; not used for the constant."""
    log_odds: Float32s
    """float32 [NUM_INPUTS]"""


class AcceptanceRate:
    """The learned rates and the weights that mix them.

    Attributes
    ----------
    rates : float32 [num_rates]
        Log odds; NaN before the first trial: then another rate is used instead.
    trials : float32 [num_rates, 2]
        HITS and TRIALS, priors included.
    weights : float32 [num_sets, NUM_INPUTS]
        The mixer's, a set for each combination of the longest matches in the request's own text,
        in other answers, and among the model's choices.

    Parameters
    ----------
    learned : Priors, optional
        Rates to start from; without them, all kinds of a source have the same.
    """

    def __init__(self, learned: Priors | None = None) -> None:
        self.rates: Float32s = np.full(NUM_RATES, np.nan, np.float32)
        self.trials: Float32s = np.zeros((len(self.rates), 2), np.float32)
        for source, rate in ((OWN, PRIOR_RATE), (ANSWERS, PRIOR_RATE), (REFERENCE, REFERENCE_RATE)):
            kinds = slice(_STARTS[source], _STARTS[source + 1])
            self.rates[kinds] = math.log(rate / (1 - rate))
            self.trials[kinds] = rate * PRIOR_TRIALS, PRIOR_TRIALS
        if learned is not None:
            shares = learned.shares.clip(_MIN_SHARE, _MAX_SHARE)
            self.rates[learned.indices] = np.log(shares / (1 - shares))
            self.trials[learned.indices, HITS] = shares * priors.TRIALS
            self.trials[learned.indices, TRIALS] = priors.TRIALS
        kinds = slice(_STARTS[_CHOICE], _STARTS[_CHOICE_LEVEL])
        rates = initial_rates()
        self.rates[kinds] = np.log(rates / (1 - rates))
        self.trials[kinds] = np.stack([rates * PRIOR_TRIALS, np.full_like(rates, PRIOR_TRIALS)], 1)
        weights = [_INITIAL_WEIGHTS, *[_INITIAL_WEIGHTS_WITH_CHOICES] * NUM_LENGTHS]
        self.weights: Float32s = np.tile(np.array(weights, np.float32), (2 * _SETS * _SETS, 1))

    @property
    def arrays(self) -> tuple[Float32s, Float32s, Float32s]:
        """The fields of RateArrays."""
        return self.rates, self.trials, self.weights

    @property
    def num_bytes(self) -> int:
        return self.rates.nbytes + self.trials.nbytes + self.weights.nbytes


@kernel
def _sigmoid(log_odds: np.float32) -> np.float32:
    return _ONE / (_ONE + math.exp(-log_odds))


@kernel
def weight_set(longest: Int32s, spaces: Int32s) -> int:
    """The set of weights for all candidates of a text.

    `longest` and `spaces` are int32 [NUM_SPACES], the text's longest matches and spaces.
    """
    has_reference = np.int64(spaces[REFERENCE] != NO_SPACE)
    in_trie = (has_reference * _SETS + longest[OWN]) * _SETS + longest[ANSWERS]
    return in_trie * _CHOICE_SETS + longest[CHOICES]


@kernel
def new_mixer_inputs() -> MixerInputs:
    """The arrays for `estimate` and `learn_token`."""
    return MixerInputs(np.empty(NUM_INPUTS, np.int32), np.empty(NUM_INPUTS, np.float32))


@kernel
def estimate(
    evidence: Int32s, i: int, learned: RateArrays, weights: int, inputs: MixerInputs
) -> np.float32:
    """The probability that the model's next token is candidate `i`, a row of `evidence`.

    `weights` is the text's set of weights. Fills `inputs`.
    """
    rates, indices, log_odds = learned.rates, inputs.indices, inputs.log_odds
    own, answers, reference = evidence[i, OWN], evidence[i, ANSWERS], evidence[i, REFERENCE]
    indices[OWN] = _STARTS[OWN] + own
    indices[ANSWERS] = _STARTS[ANSWERS] + answers
    indices[REFERENCE] = _STARTS[REFERENCE] + reference
    own_odds = rates[indices[OWN]]
    answers_odds = rates[indices[ANSWERS]]
    reference_odds = rates[indices[REFERENCE]] if reference else _float(0)
    # Both sources together; before the first trial of the pair, the sum of their log odds.
    indices[_PAIR] = _STARTS[_PAIR] + COARSE_KINDS[own] * NUM_COARSE_KINDS + COARSE_KINDS[answers]
    pair = _learned_or(rates, indices[_PAIR], _sum(own_odds, answers_odds))
    level = min(max(np.int32(pair + 8), 0), _LEVELS - 1)
    indices[_LEVEL] = _STARTS[_LEVEL] + level
    sparse = evidence[i, SPARSE_OWN] * NUM_SPARSE_KINDS + evidence[i, SPARSE_ANSWERS]
    indices[_SPARSE] = _STARTS[_SPARSE] + sparse * _LEVELS + level
    choice = evidence[i, CHOSEN]
    indices[_CHOICE] = _STARTS[_CHOICE] + choice
    indices[_CHOICE_LEVEL] = _STARTS[_CHOICE_LEVEL] + choice * _LEVELS + level
    log_odds[_CHOICE] = rates[indices[_CHOICE]] if choice else _float(0)
    log_odds[_CHOICE_LEVEL] = (
        _learned_or(rates, indices[_CHOICE_LEVEL], log_odds[_CHOICE]) if choice else _float(0)
    )
    log_odds[OWN] = own_odds
    log_odds[ANSWERS] = answers_odds
    log_odds[REFERENCE] = reference_odds
    log_odds[_PAIR] = pair
    log_odds[_LEVEL] = _learned_or(rates, indices[_LEVEL], pair)
    log_odds[_SPARSE] = _learned_or(rates, indices[_SPARSE], pair)
    log_odds[_BIAS] = _BIAS_INPUT
    total = _float(0)
    for j in range(NUM_INPUTS):
        total += learned.weights[weights, j] * log_odds[j]
    return min(max(_sigmoid(total), MIN_ESTIMATE), MAX_ESTIMATE)


@kernel
def _sum(own_odds: np.float32, answers_odds: np.float32) -> np.float32:
    return min(max(own_odds + answers_odds - BASE_LOG_ODDS, _MIN_SUM), _MAX_SUM)


@kernel
def _learned_or(rates: Float32s, index: int, default: np.float32) -> np.float32:
    return default if math.isnan(rates[index]) else rates[index]


@kernel
def _record(
    learned: RateArrays,
    index: int,
    hit: np.float32,
    prior: np.float32,
    prior_trials: np.float32,
) -> None:
    """Record a trial of a rate; `prior` is its log odds before the first trial."""
    rates, trials = learned.rates, learned.trials
    hits, tried = trials[index, HITS], trials[index, TRIALS]
    if tried == 0:
        hits, tried = prior_trials * _sigmoid(prior), prior_trials
    hits += hit
    tried += _ONE
    if tried > MEMORY_TRIALS:
        hits, tried = hits * _float(0.5), tried * _float(0.5)
    trials[index, HITS], trials[index, TRIALS] = hits, tried
    share = min(max(hits / tried, _MIN_SHARE), _MAX_SHARE)
    rates[index] = math.log(share / (_ONE - share))


@kernel
def learn_token(
    evidence: Int32s,
    size: int,
    token: int,
    learned: RateArrays,
    weights: int,
    inputs: MixerInputs,
) -> None:
    """The model emitted `token`: record a trial for each of the `size` candidates in its place.

    `weights` is the text's set of weights; `inputs` is overwritten.
    """
    indices, log_odds = inputs.indices, inputs.log_odds
    for i in range(size):
        prob = estimate(evidence, i, learned, weights, inputs)
        if prob < MIN_LEARNED_PROBABILITY:
            continue
        hit = _float(evidence[i, TOKEN] == token)
        _record(learned, indices[OWN], hit, log_odds[OWN], PRIOR_TRIALS)
        _record(learned, indices[ANSWERS], hit, log_odds[ANSWERS], PRIOR_TRIALS)
        if evidence[i, REFERENCE]:
            _record(learned, indices[REFERENCE], hit, log_odds[REFERENCE], PRIOR_TRIALS)
        both = _sum(log_odds[OWN], log_odds[ANSWERS])
        _record(learned, indices[_PAIR], hit, both, PRIOR_TRIALS)
        for narrow in (_LEVEL, _SPARSE):
            _record(learned, indices[narrow], hit, log_odds[_PAIR], NARROW_TRIALS)
        if evidence[i, CHOSEN]:
            _record(learned, indices[_CHOICE], hit, log_odds[_CHOICE], PRIOR_TRIALS)
            _record(learned, indices[_CHOICE_LEVEL], hit, log_odds[_CHOICE], NARROW_TRIALS)
        if hit and prob >= MAX_ESTIMATE:
            continue  # otherwise the weights would grow for as long as a text repeats itself
        for j in range(NUM_INPUTS):
            weight = learned.weights[weights, j] + LEARNING_RATE * (hit - prob) * log_odds[j]
            learned.weights[weights, j] = min(max(weight, -MAX_WEIGHT), MAX_WEIGHT)
