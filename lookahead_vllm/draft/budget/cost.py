"""The cost of a step: measured at start, then corrected by every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.captured import (
    NO_GRAPHS,
    NOTHING_CAPTURED,
    CapturedSizes,
    GraphTimes,
)
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest, find_branching

CRITICAL_SLOWDOWN = 1.25
"""A step of the critical decoding length takes this many times as long as a step of one token."""

MEMORY_SECONDS = 10.0
"""The weight of an observed step falls to 1/e in this time."""

SPEED_STEPS = 10
"""The speed of the machine is averaged over about so many steps."""

NOISE_SHARE = 0.1
"""The assumed standard deviation of a step's time, as a share of the predicted time."""

MAX_SLOWDOWN = 3.0
"""A step's time counts up to this many times the prediction; the excess has another cause."""

MIN_WEIGHT_SHARE = 0.2
"""No weight falls below this share of its value at start."""

PROMPT_WEIGHT = 16
"""A delay of a request that waits for its first token weighs as much as one of so many requests
that decode. Measured in docs/experiments.md."""

GAUSS_SEIDEL_SWEEPS = 30
"""The number of sweeps over the weights after each step."""

Floats = NDArray[np.float64]


class CostCurve:
    """t(l): the cost of a forward pass over l tokens without attention to the context.

    The unit is the caller's. The curve is piecewise linear through the measured points, constant
    below the first one, and continues with the last slope above the last one. It never falls: a
    point below an earlier one is raised to it. Up to the largest of `graphs`, which run such
    passes, it has plateaus: the time of the smallest graph that holds the tokens.

    Raises
    ------
    ValueError
        There are no points, the sizes do not rise, or a time is not above 0.
    """

    def __init__(
        self, sizes: Sequence[int], times: Sequence[float], graphs: GraphTimes = NO_GRAPHS
    ) -> None:
        self.graphs = graphs
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self.times = np.maximum.accumulate(np.asarray(times, dtype=np.float64))
        if len(sizes) == 0 or len(sizes) != len(times):
            raise ValueError(f"{len(sizes)} sizes and {len(times)} times do not make a cost curve")
        if (np.diff(self.sizes, prepend=0) <= 0).any() or not (
            np.isfinite(self.times).all() and self.times[0] > 0
        ):
            raise ValueError(f"the sizes must rise and the times be above 0: {self}")
        self._table: Floats = np.empty(0)
        self.last_slope = 0.0
        """The cost of one more token, beyond the last point."""
        if len(sizes) > 1:
            self.last_slope = float(np.diff(self.times)[-1] / np.diff(self.sizes)[-1])

    def __call__(self, num_tokens: NDArray[np.int64] | int) -> Floats:
        """t at each of `num_tokens`, float64 of the same shape."""
        beyond = np.maximum(0.0, num_tokens - self.sizes[-1])
        inside: Floats = np.interp(num_tokens, self.sizes, self.times)
        return self.graphs.overlay(num_tokens, inside + beyond * self.last_slope)

    def between(self, first: int, last: int) -> Floats:
        """t(first), ..., t(last): float64 [last - first + 1]."""
        if last >= len(self._table):
            self._table = self(np.arange(2 * last + 1))
        return self._table[first : last + 1]

    def with_graphs(self, graphs: GraphTimes) -> CostCurve:
        """This curve for passes that run in `graphs` where these can."""
        return CostCurve(self.sizes.astype(np.int64).tolist(), self.times.tolist(), graphs)

    @property
    def critical_decoding_length(self) -> int:
        """The largest number of tokens that cost at most CRITICAL_SLOWDOWN times t(1).

        Source: Lookahead (KDD 2024), section 3.2.
        """
        lengths = np.arange(1, int(self.sizes[-1]) + 1)
        return int(lengths[self(lengths) <= CRITICAL_SLOWDOWN * float(self(1))][-1])

    def __str__(self) -> str:
        points = zip(self.sizes.tolist(), self.times.tolist(), strict=False)
        return ", ".join(f"{size:.0f} tokens {time:.4g}" for size, time in points)


class Load(NamedTuple):
    """A step's work for requests that do not decode."""

    prefill: int = 0
    """Prompt tokens."""
    prompts: int = 0
    """Requests whose prompt tokens these are."""
    waits: bool = False
    """Whether the step waits for its drafts, even if it gets none: they are grown late."""

    def plain_tokens(self, decodes: int) -> int:
        """What the step is worth without nodes, in tokens, if `decodes` requests decode."""
        return decodes + PROMPT_WEIGHT * self.prompts


class StepWork(NamedTuple):
    """The quantities that determine the time of a step without prompts."""

    requests: int
    nodes: int
    context: float
    """The sum of the requests' context lengths, in tokens: what attention reads once a request."""
    causal: float
    """Rows times context length, summed over requests without a tree or with a chain."""
    trees: float
    """Rows times context length, summed over requests with a branching tree."""
    waits: bool = False
    """Whether the device waited for drafts before the next step, even if that got none."""

    @classmethod
    def of_decodes(cls, forest: DraftForest, contexts: Int64s, all_contexts: Int64s) -> StepWork:
        """The work of a step whose r requests all decode; t of them have a tree in `forest`."""
        attended = _attended(forest.parents, forest.firsts, contexts, all_contexts)
        return cls(len(all_contexts), forest.num_nodes, *attended)

    def without_drafts(self) -> StepWork:
        """The same step, if no request had a draft."""
        return StepWork(self.requests, 0, self.context, self.context, 0.0)


@kernel
def _attended(
    parents: Int32s, firsts: Int64s, contexts: Int64s, all_contexts: Int64s
) -> tuple[int, int, int]:
    """`context`, `causal` and `trees` of StepWork."""
    branches = find_branching(parents, firsts)
    context, in_trees = all_contexts.sum(), 0
    causal = context
    for tree in range(len(contexts)):
        num_nodes = firsts[tree + 1] - firsts[tree]
        if branches[tree]:
            in_trees += (1 + num_nodes) * contexts[tree]
            causal -= contexts[tree]
        else:
            causal += num_nodes * contexts[tree]
    return context, causal, in_trees


class StepPrices(NamedTuple):
    """The time of a step without drafts and prompts, and the time that draft nodes add to it."""

    base: float
    """The step without nodes, its prompts left out: their time is not due to drafts."""
    waiting: float
    """The part of `base` for which the step waits for its drafts."""
    forward: Floats
    """float64 [m]: the additional time of the forward pass with 0, 1, ..., m - 1 nodes in all. m is
    num_nodes + 1, or larger if `captured`: up to the end of the plateau that begins next."""
    chain: Floats
    """float64 [requests]: what each node of a chain adds beyond `forward`."""
    tree: Floats
    """float64 [requests]: what each node of a branching tree adds beyond `forward`."""
    root: Floats
    """float64 [requests]: what the root's row adds if the request's tree branches."""
    captured: bool
    """Whether the step's first node is in a captured graph, so that `forward` has plateaus."""


_NOTHING: Floats = np.empty(0)
NO_PRICES = StepPrices(0.0, 0.0, _NOTHING, _NOTHING, _NOTHING, _NOTHING, False)
"""Nodes are sent whatever they cost."""


class StepCost:
    """Predicts the time of a step, and learns from the time of every real step.

    The prediction is a weighted sum of eight features, times the machine's slowdown. The features
    are the forward pass by the curve, a constant, 1 if the step waited for drafts, and requests,
    nodes, context, causal and trees of StepWork. The slowdown is the mean of the last SPEED_STEPS
    steps: it follows other programs and clock rates, which change every step alike.
    The weights are the least-squares fit to the times over the slowdown of about the last
    MEMORY_SECONDS, with the measurement at start as a prior: weights that these steps do not
    determine keep their values. What pays depends on the weights alone.

    Parameters
    ----------
    curve : CostCurve
        The forward pass without drafts, and without attention to a context.
    context : float
        The time of one token of a request's context, in the unit of the curve.
    causal, trees : float
        The time of one row for each token of context, in a chain and in a branching tree.
    drafts : float
        The time that drafts add to a step, however many they are.
    captured : CapturedSizes
        The captured graphs of the whole model; `curve` is a pass outside of them.
    parts : int
        The devices that compute equal parts of a step's nodes at once. A device's own nodes are
        the `nodes` of StepWork.

    Raises
    ------
    ValueError
        A cost is negative or not finite.
    """

    def __init__(
        self,
        curve: CostCurve,
        context: float = 0.0,
        causal: float = 0.0,
        trees: float = 0.0,
        drafts: float = 0.0,
        captured: CapturedSizes = NOTHING_CAPTURED,
        parts: int = 1,
    ) -> None:
        costs = (context, causal, trees, drafts)
        if not 0 <= min(costs) <= max(costs) < math.inf:
            raise ValueError(f"a cost is a number of at least 0: {costs}")
        self.curve = curve
        self.captured = captured
        self.parts = parts
        self.chain = 0.0
        """The time of a trained drafter's passes after its first one."""
        self._without_drafts = curve.with_graphs(captured.without_drafts)
        self._with_drafts = curve.with_graphs(captured.with_drafts)
        self._start = np.array([1.0, 0.0, drafts, 0.0, 0.0, context, causal, trees])
        one = float(curve(1))
        row = 0.5 * max(causal, trees)
        jump = max(0.1 * one, 0.5 * drafts)
        # The prior's standard deviation of each weight.
        spread = np.array([0.3, 0.3 * one, jump, 0.02 * one, 0.02 * one, 0.5 * context, row, row])
        self._precision = 1 / np.maximum(spread, 1e-9 * one) ** 2
        self._normal_matrix = np.zeros((8, 8))
        self._right_side = np.zeros(8)
        self.slowdown = 1.0
        """How many times as long as by the weights the last steps took."""
        self.steps_since_plain = 0
        """Steps that waited for drafts since the last one that did not. The cost of drafts cannot
        be learned from such steps alone."""
        self.weights: Floats = self._start.copy()

    @property
    def critical_decoding_length(self) -> int:
        """That of a forward pass with drafts, as measured at start; see CostCurve."""
        return self._with_drafts.critical_decoding_length

    def predict(self, work: StepWork) -> float:
        """The time of a step with this work, in the unit of the curve."""
        return self.slowdown * float(self.weights @ self._features(work))

    def observe(self, work: StepWork, time: float) -> float:
        """Learn from a real step, and return the time that was predicted for it.

        `time` is in seconds, and so must be the curve.
        """
        self.steps_since_plain = self.steps_since_plain + 1 if work.waits else 0
        features = self._features(work)
        by_weights = float(self.weights @ features)
        predicted = self.slowdown * by_weights
        time = min(time, MAX_SLOWDOWN * predicted)
        # Scaled by the prediction: scaled by the time, slow steps would count less than fast ones.
        noise = NOISE_SHARE * by_weights
        _add_step(
            features / noise,
            time / self.slowdown / noise,
            math.exp(-time / MEMORY_SECONDS),
            self._normal_matrix,
            self._right_side,
            self._precision,
            self._start,
            self.weights,
        )
        error = min(max(time / predicted - 1, -0.5), 0.5)  # one outlier is no slowdown
        self.slowdown *= 1 + error / SPEED_STEPS
        return predicted

    def _features(self, work: StepWork) -> Floats:
        curve = self._with_drafts if work.nodes else self._without_drafts
        num_rows = work.requests + work.nodes
        forward = curve.between(num_rows, num_rows)[0]
        return np.array([forward, 1.0, work.waits, *work[:-1]])

    def prices(self, contexts: Int64s, load: Load, num_nodes: int) -> StepPrices:
        """The time of the step without drafts and prompts, and what up to `num_nodes` nodes add.

        All of these are without the slowdown. `contexts`, int64 [t], are the committed tokens
        before the root, of the requests that decode.
        """
        scale, fixed, drafts, request, node, read, causal, trees = self.weights.tolist()
        waiting, drafts = (drafts, 0.0) if load.waits else (0.0, drafts)
        decodes = len(contexts)
        first = decodes + load.prefill
        last = first - -num_nodes // self.parts
        curve = self.curve if load.prefill else self._with_drafts
        captured = bool(first < curve.graphs.largest)
        if captured:
            last = curve.graphs.padded(last + 1)
        forward = scale * curve.between(first, last)
        plain = scale * float(self._without_drafts.between(decodes, decodes)[0])
        attention = (read + causal) * float(contexts.sum())
        base = plain + fixed + waiting + request * decodes + attention
        forward += drafts - (forward[0] if load.prefill else plain)
        forward[0] = 0.0
        chain, tree = node + causal * contexts, node + trees * contexts
        root = np.maximum(tree - chain, 0.0)
        if self.parts > 1:  # the largest part takes the longest
            forward = forward[-(-np.arange(num_nodes + 1) // self.parts)]
            chain, tree = chain / self.parts, tree / self.parts
        return StepPrices(base, waiting, forward, chain, tree, root, captured)


def compile_cost() -> None:
    """Compile the kernels of this module, so that no request waits for the compiler."""
    StepCost(CostCurve([1], [1.0])).observe(StepWork(1, 0, 0.0, 0.0, 0.0), 1.0)


@kernel
def _add_step(
    features: Floats,
    time: float,
    fade: float,
    normal_matrix: Floats,
    right_side: Floats,
    precision: Floats,
    start: Floats,
    weights: Floats,
) -> None:
    """Add one row to the least squares, and update `weights` float64 [n] in place.

    Solves (normal_matrix + diag(precision)) weights = right_side + precision * start by
    Gauss-Seidel sweeps from the last weights, with each weight bounded below by MIN_WEIGHT_SHARE
    of its start. `normal_matrix` [n, n] and `right_side` [n] fade by `fade` first. `precision` [n]
    is above 0.
    """
    n = len(features)
    for i in range(n):
        right_side[i] = fade * right_side[i] + features[i] * time
        for j in range(n):
            normal_matrix[i, j] = fade * normal_matrix[i, j] + features[i] * features[j]
    for _ in range(GAUSS_SEIDEL_SWEEPS):
        for i in range(n):
            rest = right_side[i] + precision[i] * start[i]
            for j in range(n):
                if j != i:
                    rest -= normal_matrix[i, j] * weights[j]
            weights[i] = max(
                rest / (normal_matrix[i, i] + precision[i]), MIN_WEIGHT_SHARE * start[i]
            )
