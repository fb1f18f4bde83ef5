"""What a step costs: measured at start, then corrected by every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int64s, kernel

MEMORY = 5.0  # seconds after which a step counts 1/e of what it did
RELATIVE_NOISE = 0.1  # of the time of a step that no model foresees
DRIFT = 0.1  # of the time predicted, by which steps are off on average where the load has changed:
DRIFT_STEPS = 5  # the last ones, about so many;
STEPS_KEPT_ON_DRIFT = 2  # then all steps before count together as so many
MAX_SLOWDOWN = (
    3.0  # a step that took so many times what was predicted was held up by something else
)
MIN_WEIGHT_SHARE = 0.2  # of what was measured at start, that a cost may fall to
GAUSS_SEIDEL_SWEEPS = 30  # over the costs, after each step
CRITICAL = 1.25  # the critical decoding length costs so many times what one token does

Floats = NDArray[np.float64]


class CostCurve:
    """t(l): what a forward pass over l tokens costs beside attention to the context, in any unit.

    Piecewise linear through the measured points; constant before the first one, and going on with
    the last slope after the last one. More tokens never cost less: a point below an earlier one
    is raised to it.

    Parameters
    ----------
    sizes : Sequence[int]
        Numbers of tokens, rising, at least 1.
    times : Sequence[float]
        What a pass over so many tokens costs, above 0.
    """

    def __init__(self, sizes: Sequence[int], times: Sequence[float]) -> None:
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
        """What a token more costs where there are many."""
        if len(sizes) > 1:
            self.last_slope = float(np.diff(self.times)[-1] / np.diff(self.sizes)[-1])

    def __call__(self, num_tokens: NDArray[np.int64] | int) -> Floats:
        """t at each of `num_tokens`, float64 of the same shape."""
        beyond = np.maximum(0.0, num_tokens - self.sizes[-1])
        inside: Floats = np.interp(num_tokens, self.sizes, self.times)
        return inside + beyond * self.last_slope

    def between(self, first: int, last: int) -> Floats:
        """t(first), ..., t(last): float64 [last - first + 1]."""
        if last >= len(self._table):
            self._table = self(np.arange(2 * last + 1))
        return self._table[first : last + 1]

    @property
    def critical_decoding_length(self) -> int:
        """The most tokens that cost hardly more than one (CRITICAL times): Lookahead (KDD 2024),
        section 3.2."""
        lengths = np.arange(1, int(self.sizes[-1]) + 1)
        return int(lengths[self(lengths) <= CRITICAL * float(self(1))][-1])

    def __str__(self) -> str:
        points = zip(self.sizes.tolist(), self.times.tolist(), strict=False)
        return ", ".join(f"{size:.0f} tokens {time:.4g}" for size, time in points)


class Load(NamedTuple):
    """What a step has to do beside drafts."""

    decodes: int = 0
    """Requests that get one token."""
    context: int = 0
    """Tokens that they attend to, together."""
    prefill: int = 0
    """Tokens of prompts."""


class StepWork(NamedTuple):
    """What a step did, in what its time depends on."""

    tokens: int
    """All that went through the model."""
    requests: int
    nodes: int
    """Those of the tokens that were drafts."""
    context: float
    """Tokens that the requests attend to, together: what is read, whoever attends to it."""
    causal: float
    """Rows of plain requests and chains times the context of each, summed."""
    trees: float
    """The same of branching trees."""


class StepCost:
    """The time of a step: measured at first, then corrected by every real step.

    It is a weighted sum: the curve at the step's tokens, a constant, and so much for having drafts
    at all, for each request, each node, each token of context, and each that a row attends to, in
    chains and in trees. The weights are found by least squares over the last MEMORY seconds, beside
    what was measured at start: whatever the load does not tell apart stays as it was.

    Parameters
    ----------
    curve : CostCurve
        The forward pass without drafts, and without attention to a context.
    context : float
        The time of one token of a request's context, in the unit of the curve.
    causal, trees : float
        The time of one row for each token of context, in a chain and in a branching tree.
    drafts : float
        What a step with drafts takes longer, however many they are.
    """

    def __init__(
        self,
        curve: CostCurve,
        context: float = 0.0,
        causal: float = 0.0,
        trees: float = 0.0,
        drafts: float = 0.0,
    ) -> None:
        costs = (context, causal, trees, drafts)
        if not 0 <= min(costs) <= max(costs) < math.inf:
            raise ValueError(f"a cost is a number of at least 0: {costs}")
        self.curve = curve
        self._start = np.array([1.0, 0.0, drafts, 0.0, 0.0, context, causal, trees])
        one = float(curve(1))
        # How far from the start a weight may well be.
        row = 0.5 * max(causal, trees)
        jump = max(0.1 * one, 0.5 * drafts)
        spread = np.array([0.3, 0.3 * one, jump, 0.02 * one, 0.02 * one, 0.5 * context, row, row])
        self._trust = 1 / np.maximum(spread, 1e-9 * one) ** 2
        self._seen = np.zeros((8, 8))
        self._told = np.zeros(8)
        self._count = 1.0
        self._drift = 0.0
        self.drafting = 0
        """Steps with drafts since the last one without: alone they do not tell what drafts cost."""
        self.weights: Floats = self._start.copy()

    def predict(self, work: StepWork) -> float:
        """The time of a step that does this."""
        return float(self.weights @ self._features(work))

    def observe(self, work: StepWork, time: float, seconds: float | None = None) -> float:
        """Learn from a real step; returns what was predicted for it.

        `seconds` is the time once more where the curve's unit is another.
        """
        self.drafting = self.drafting + 1 if work.nodes else 0
        features = self._features(work)
        predicted = float(self.weights @ features)
        time = min(time, MAX_SLOWDOWN * predicted)
        fade = math.exp(-(time if seconds is None else seconds) / MEMORY)
        error = min(max(time / predicted - 1, -0.5), 0.5)  # one hiccup is no drift
        self._drift += (error - self._drift) / DRIFT_STEPS
        if abs(self._drift) > DRIFT:  # the load on the machine has changed
            fade = min(fade, STEPS_KEPT_ON_DRIFT / self._count)
        # By what was predicted, not by the time: else a slow step would count less than a fast one.
        scaled = features / (RELATIVE_NOISE * predicted)
        self._count = fade * self._count + 1
        target = time / (RELATIVE_NOISE * predicted)
        _learn_step(
            scaled, target, fade, self._seen, self._told, self._trust, self._start, self.weights
        )
        return predicted

    def _features(self, work: StepWork) -> Floats:
        forward = self.curve.between(work.tokens, work.tokens)[0]
        return np.array([forward, 1.0, work.nodes > 0, *work[1:]])

    def prices(
        self, contexts: Int64s, load: Load, num_nodes: int
    ) -> tuple[float, Floats, Floats, Floats, Floats]:
        """What a step costs without drafts and what nodes add to it.

        Parameters
        ----------
        contexts : int64 [t]
            Committed tokens of the requests that may have drafts.
        num_nodes : int
            The most nodes that are asked about.

        Returns
        -------
        base : float
            The step without a node; prompts in it are not counted: no draft is to blame for them.
        forward : float64 [num_nodes + 1]
            What so many nodes add, together; 0 for none.
        chain, tree, root : float64 [t]
            What a node of each request adds beside, in a chain and in a tree, and what its root
            adds when it moves from the one to the other.
        """
        scale, fixed, drafts, request, node, read, causal, trees = self.weights.tolist()
        decodes = len(contexts) + load.decodes
        forward = scale * self.curve.between(
            decodes + load.prefill, decodes + load.prefill + num_nodes
        )
        base = (
            scale * float(self.curve.between(decodes, decodes)[0])
            + fixed
            + request * decodes
            + (read + causal) * (float(contexts.sum()) + load.context)
        )
        forward += drafts - forward[0]
        forward[0] = 0.0
        chain, tree = node + causal * contexts, node + trees * contexts
        return base, forward, chain, tree, np.maximum(tree - chain, 0.0)

    def marginal(self, context: float) -> float:
        """What a node adds to a step that is large already."""
        scale, _, _, _, node, _, causal, _ = self.weights.tolist()
        return float(scale * self.curve.last_slope + node + causal * context)


@kernel
def _learn_step(
    features: Floats,
    target: float,
    fade: float,
    seen: Floats,
    told: Floats,
    trust: Floats,
    start: Floats,
    weights: Floats,
) -> None:
    """Another row of the least squares: fills `weights` float64 [n], and `seen` and `told` go on.

    The least squares of (seen + trust) weights = told + trust start, where nothing is free or pays,
    whatever noise says: no weight falls below MIN_WEIGHT_SHARE of its start. `trust` float64 [n] is
    the diagonal of its matrix, above 0. By Gauss and Seidel's method, from the last weights on.
    """
    n = len(features)
    for i in range(n):
        told[i] = fade * told[i] + features[i] * target
        for j in range(n):
            seen[i, j] = fade * seen[i, j] + features[i] * features[j]
    for _ in range(GAUSS_SEIDEL_SWEEPS):
        for i in range(n):
            rest = told[i] + trust[i] * start[i]
            for j in range(n):
                if j != i:
                    rest -= seen[i, j] * weights[j]
            weights[i] = max(rest / (seen[i, i] + trust[i]), MIN_WEIGHT_SHARE * start[i])
