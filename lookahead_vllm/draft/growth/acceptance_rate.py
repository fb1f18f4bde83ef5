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

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.growth import chains, priors, recycling
from lookahead_vllm.draft.growth.candidates import (
    CHOICES,
    CHOSEN,
    COARSE_KINDS,
    MAX_ALL_CANDIDATES,
    NUM_COARSE_KINDS,
    NUM_KINDS,
    NUM_SOURCES,
    NUM_SPARSE_KINDS,
    REPEAT_KINDS,
    SPARSE_ANSWERS,
    SPARSE_OWN,
    TOKEN,
)
from lookahead_vllm.draft.growth.priors import Priors
from lookahead_vllm.draft.growth.recycling import NUM_CHOICE_KINDS, NUM_LENGTHS
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.sources import ANSWERS, OWN, REFERENCE
from lookahead_vllm.draft.trie.suffix import NUM_CONTIGUOUS
from lookahead_vllm.draft.trie.table import NO_SPACE

Float32s = NDArray[np.float32]

# Columns of `AcceptanceRate.trials`.
HITS, TRIALS = range(2)

_float = np.float32  # all arithmetic is in single precision

PRIOR_RATE, PRIOR_TRIALS = 0.15, _float(4)  # a rate's initial value, and the trials it counts for
REFERENCE_RATE = 0.7  # a reference's initial rate: the answer is likely to copy it
REPEAT_RATE = 0.95  # the initial rate of the only token that followed the whole answer
BASE_LOG_ODDS = _float(math.log(0.12 / 0.88))  # any candidate's log odds; subtracted in `_sum`
NARROW_TRIALS = _float(2)  # prior trials of a rate that starts from the value of a wider one
MEMORY_TRIALS = _float(400)  # beyond this many trials of a rate, all its trials are halved
LEARNING_RATE = _float(0.01)  # the step size of the mixer's weights
MIN_ESTIMATE, MAX_ESTIMATE = _float(0.002), _float(0.995)  # bounds of a candidate's probability
MAX_WEIGHT = _float(4)  # of the mixer; larger ones would make a candidate's probability 0 or 1
MIN_LEARNED_PROBABILITY = 0.005  # less likely candidates are not learned from, to save time

_LEVELS = 16  # the number of classes of log odds, each with a rate of its own

_ONE = _float(1)
_LOG2_E, _LN_2 = _float(math.log2(math.e)), _float(math.log(2))
_TAYLOR = tuple(_float(1 / math.factorial(i)) for i in range(6))
_EXPONENT_BIAS, _EXPONENT_SHIFT = np.int32(127), np.int32(23)  # of single precision
_MAX_POWER = _float(30)  # e to this power, plus 1, is itself in single precision
_MIN_SHARE, _MAX_SHARE = _float(0.0005), _float(0.999)  # bounds of the share of hits in trials
_MIN_SUM, _MAX_SUM = _float(-5.8), _float(3.5)  # bounds of the sum of two sources' log odds

# Inputs of the mixer: the log odds of a rate each, and a constant.
_PAIR, _LEVEL, _SPARSE, _CHOICE, _CHOICE_LEVEL, _BIAS = range(NUM_SOURCES, NUM_SOURCES + 6)
NUM_INPUTS = _BIAS + 1
_INITIAL_WEIGHTS = (0.2, 0.2, 0.6, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0)
_INITIAL_WEIGHTS_WITH_CHOICES = (0.1, 0.1, 0.6, 0.1, 0.1, 0.1, 0.4, 0.4, 0.0)
_INITIAL_WEIGHTS_ON_CHAIN = (0.05, 0.05, 0.1, 0.05, 0.05, 0.05, 0.5, 0.5, 0.0)
_INITIAL_WEIGHTS_OF_CHAIN_ALONE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0)
_BIAS_INPUT = _float(0.4)

_NUM_MODEL_KINDS = NUM_CHOICE_KINDS + chains.NUM_DRAFTED_KINDS
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
        _NUM_MODEL_KINDS,
        _NUM_MODEL_KINDS * _LEVELS,
    ]
)
_SETS = NUM_CONTIGUOUS + 1
_CHOICE_SETS = chains.ON_CHAIN + 1


NUM_RATES = int(_STARTS[-1])
(
    _FIRST_OWN,
    _FIRST_ANSWERS,
    _FIRST_REFERENCE,
    _FIRST_PAIR,
    _FIRST_LEVEL,
    _FIRST_SPARSE,
    _FIRST_CHOICE,
    _FIRST_CHOICE_LEVEL,
) = _STARTS[:-1].tolist()  # constants of the compiler


class RateArrays(NamedTuple):
    """The arrays of an `AcceptanceRate`, as the kernels take them."""

    rates: Float32s
    trials: Float32s
    weights: Float32s


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
        in other answers, and among the model's choices or the drafter's proposals.

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
        repeats = _STARTS[ANSWERS] + REPEAT_KINDS
        self.rates[repeats] = math.log(REPEAT_RATE / (1 - REPEAT_RATE))
        self.trials[repeats, HITS] = REPEAT_RATE * PRIOR_TRIALS
        if learned is not None:
            shares = learned.shares.clip(_MIN_SHARE, _MAX_SHARE)
            self.rates[learned.indices] = np.log(shares / (1 - shares))
            self.trials[learned.indices, HITS] = shares * priors.TRIALS
            self.trials[learned.indices, TRIALS] = priors.TRIALS
        kinds = slice(_STARTS[_CHOICE], _STARTS[_CHOICE_LEVEL])
        rates = np.concatenate([recycling.initial_rates(), chains.initial_rates()])
        self.rates[kinds] = np.log(rates / (1 - rates))
        self.trials[kinds] = np.stack([rates * PRIOR_TRIALS, np.full_like(rates, PRIOR_TRIALS)], 1)
        with_choices = [_INITIAL_WEIGHTS_WITH_CHOICES] * NUM_LENGTHS
        weights = [_INITIAL_WEIGHTS, *with_choices, _INITIAL_WEIGHTS_ON_CHAIN]
        self.weights: Float32s = np.tile(np.array(weights, np.float32), (2 * _SETS * _SETS, 1))
        self.weights[chains.ON_CHAIN] = _INITIAL_WEIGHTS_OF_CHAIN_ALONE  # the trie has no match

    @property
    def arrays(self) -> tuple[Float32s, Float32s, Float32s]:
        """The fields of RateArrays."""
        return self.rates, self.trials, self.weights

    @property
    def num_bytes(self) -> int:
        return self.rates.nbytes + self.trials.nbytes + self.weights.nbytes


@borrowing_kernel
def _sigmoid(log_odds: np.float32) -> np.float32:
    """1 / (1 + exp(-log_odds)) within 1e-6; the library's exp takes longer."""
    exp, power = _exp(log_odds)
    return _ONE / (_ONE + exp * _float(2) ** power)


@borrowing_kernel
def _exp(log_odds: np.float32) -> tuple[np.float32, np.float32]:
    """A polynomial and a whole number: exp(-log_odds) is their product as x * 2 ** n."""
    power = min(max(-log_odds, -_MAX_POWER), _MAX_POWER) * _LOG2_E
    whole = np.floor(power + _float(0.5))
    rest = (power - whole) * _LN_2
    exp = _TAYLOR[5]
    for i in range(4, -1, -1):
        exp = _TAYLOR[i] + rest * exp
    return exp, whole


@borrowing_kernel
def weight_set(longest: Int32s, spaces: Int32s) -> int:
    """The set of weights for all candidates of a text.

    `longest` and `spaces` are int32 [NUM_SPACES], the text's longest matches and spaces.
    """
    has_reference = np.int64(spaces[REFERENCE] != NO_SPACE)
    in_trie = (has_reference * _SETS + longest[OWN]) * _SETS + longest[ANSWERS]
    return in_trie * _CHOICE_SETS + longest[CHOICES]


class Inputs(NamedTuple):
    """The mixer's inputs for all candidates of a text, as arrays that are reused for every text.

    Written in single passes over the candidates, which compilers vectorize: one function that
    returns the probability of one candidate takes five times as long.
    """

    rates: Int64s
    """int64 [MAX_ALL_CANDIDATES, NUM_INPUTS - 1]: the index of each input's rate."""
    log_odds: Float32s
    """float32 [MAX_ALL_CANDIDATES, NUM_INPUTS]"""
    powers: Int32s
    """int32 [MAX_ALL_CANDIDATES]: the bits of powers of two in single precision."""


@kernel
def new_inputs() -> Inputs:
    """The arrays for `estimate` and `learn_token`."""
    return Inputs(
        np.zeros((MAX_ALL_CANDIDATES, NUM_INPUTS - 1), np.int64),
        np.zeros((MAX_ALL_CANDIDATES, NUM_INPUTS), np.float32),
        np.zeros(MAX_ALL_CANDIDATES, np.int32),
    )


@borrowing_kernel
def estimate(
    evidence: Int32s, size: int, learned: RateArrays, weights: int, inputs: Inputs, probs: Float32s
) -> None:
    """Write to `probs` float32 [size] how likely the model's next token is each candidate.

    The candidates are the first columns of `evidence`; `weights` is the text's set of weights.
    """
    log_odds, powers, own = inputs.log_odds, inputs.powers, learned.weights[weights]
    for i in range(size):
        _read(evidence, i, learned.rates, inputs)
    for i in range(size):
        probs[i] = _mix(log_odds[i], own)
    for i in range(size):
        probs[i], power = _exp(probs[i])
        powers[i] = (np.int32(power) + _EXPONENT_BIAS) << _EXPONENT_SHIFT
    scales = powers.view(np.float32)
    for i in range(size):
        prob = _ONE / (_ONE + probs[i] * scales[i])
        probs[i] = min(max(prob, MIN_ESTIMATE), MAX_ESTIMATE)


@borrowing_kernel
def _read(evidence: Int32s, i: int, rates: Float32s, inputs: Inputs) -> None:
    """Fill in row `i` of the inputs, for the candidate in this column of `evidence`."""
    at, log_odds = inputs.rates, inputs.log_odds
    own, answers = np.uint32(evidence[OWN, i]), np.uint32(evidence[ANSWERS, i])
    reference, choice = np.uint32(evidence[REFERENCE, i]), np.uint32(evidence[CHOSEN, i])
    at[i, OWN], at[i, ANSWERS] = _FIRST_OWN + own, _FIRST_ANSWERS + answers
    at[i, REFERENCE] = _FIRST_REFERENCE + reference
    own_odds, answers_odds = rates[_FIRST_OWN + own], rates[_FIRST_ANSWERS + answers]
    log_odds[i, OWN], log_odds[i, ANSWERS] = own_odds, answers_odds
    log_odds[i, REFERENCE] = rates[_FIRST_REFERENCE + reference] if reference else _float(0)
    # Both sources together; before the first trial of the pair, the sum of their log odds.
    pair_at = _FIRST_PAIR + COARSE_KINDS[own] * NUM_COARSE_KINDS + COARSE_KINDS[answers]
    pair = _learned_or(rates, pair_at, _sum(own_odds, answers_odds))
    level = np.uint32(min(max(np.int32(pair + _float(8)), np.int32(0)), np.int32(_LEVELS - 1)))
    sparse = evidence[SPARSE_OWN, i] * NUM_SPARSE_KINDS + evidence[SPARSE_ANSWERS, i]
    level_at, sparse_at = _FIRST_LEVEL + level, _FIRST_SPARSE + sparse * _LEVELS + level
    at[i, _PAIR], at[i, _LEVEL], at[i, _SPARSE] = pair_at, level_at, sparse_at
    log_odds[i, _PAIR] = pair
    log_odds[i, _LEVEL] = _learned_or(rates, level_at, pair)
    log_odds[i, _SPARSE] = _learned_or(rates, sparse_at, pair)
    choice_at, choice_level_at = (
        _FIRST_CHOICE + choice,
        _FIRST_CHOICE_LEVEL + choice * _LEVELS + level,
    )
    at[i, _CHOICE], at[i, _CHOICE_LEVEL] = choice_at, choice_level_at
    log_odds[i, _CHOICE] = log_odds[i, _CHOICE_LEVEL] = _float(0)
    if choice:
        log_odds[i, _CHOICE] = rates[choice_at]
        log_odds[i, _CHOICE_LEVEL] = _learned_or(rates, choice_level_at, rates[choice_at])
    log_odds[i, _BIAS] = _BIAS_INPUT


@borrowing_kernel
def _mix(log_odds: Float32s, weights: Float32s) -> np.float32:
    total = _float(0)
    for j in range(NUM_INPUTS):
        total += weights[j] * log_odds[j]
    return total


@borrowing_kernel
def _sum(own_odds: np.float32, answers_odds: np.float32) -> np.float32:
    return min(max(own_odds + answers_odds - BASE_LOG_ODDS, _MIN_SUM), _MAX_SUM)


@borrowing_kernel
def _learned_or(rates: Float32s, index: int, default: np.float32) -> np.float32:
    rate = rates[index]
    return default if math.isnan(rate) else rate


@borrowing_kernel
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


@borrowing_kernel
def learn_token(
    evidence: Int32s, size: int, token: int, learned: RateArrays, weights: int, inputs: Inputs
) -> None:
    """The model emitted `token`: record a trial for each of the `size` candidates in its place.

    `weights` is the text's set of weights.
    """
    own = learned.weights[weights]
    for i in range(size):
        _read(evidence, i, learned.rates, inputs)
        at, log_odds = inputs.rates[i], inputs.log_odds[i]
        prob = min(max(_sigmoid(_mix(log_odds, own)), MIN_ESTIMATE), MAX_ESTIMATE)
        if prob < MIN_LEARNED_PROBABILITY:
            continue
        hit = _float(evidence[TOKEN, i] == token)
        _record(learned, at[OWN], hit, log_odds[OWN], PRIOR_TRIALS)
        _record(learned, at[ANSWERS], hit, log_odds[ANSWERS], PRIOR_TRIALS)
        if evidence[REFERENCE, i]:
            _record(learned, at[REFERENCE], hit, log_odds[REFERENCE], PRIOR_TRIALS)
        both = _sum(log_odds[OWN], log_odds[ANSWERS])
        _record(learned, at[_PAIR], hit, both, PRIOR_TRIALS)
        for narrow in (_LEVEL, _SPARSE):
            _record(learned, at[narrow], hit, log_odds[_PAIR], NARROW_TRIALS)
        if evidence[CHOSEN, i]:
            _record(learned, at[_CHOICE], hit, log_odds[_CHOICE], PRIOR_TRIALS)
            _record(learned, at[_CHOICE_LEVEL], hit, log_odds[_CHOICE], NARROW_TRIALS)
        if hit and prob >= MAX_ESTIMATE:
            continue  # otherwise the weights would grow for as long as a text repeats itself
        for j in range(NUM_INPUTS):
            weight = own[j] + LEARNING_RATE * (hit - prob) * log_odds[j]
            own[j] = min(max(weight, -MAX_WEIGHT), MAX_WEIGHT)
