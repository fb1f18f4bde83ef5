"""How many nodes a step can afford: what a step costs, and the cut that makes the most of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.kernel import Ints, Words, kernel
from lookahead_vllm.draft.tree import DraftForest, DraftTree

MEMORY = 5.0  # seconds after which a step counts 1/e of what it did
NOISE = 0.1  # of the time of a step that no model foresees
DRIFT = 0.1  # of the time predicted, by which steps are off on average where the load has changed:
DRIFT_STEPS = 5  # the last ones, about so many;
KEPT_STEPS = 2  # then all steps before count together as so many
HICCUP = 3.0  # a step that took so many times what was predicted was held up by something else
LEAST_PART = 0.2  # of what was measured at start, that a cost may fall to
SWEEPS = 30  # over the costs, after each step
LOOK_AFTER = 16  # steps in a row with drafts that promise less than
WORTH_A_LOOK = 1.3  # times the tokens per time of a plain step, what one costs is looked at again
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
        time = min(time, HICCUP * predicted)
        fade = math.exp(-(time if seconds is None else seconds) / MEMORY)
        error = min(max(time / predicted - 1, -0.5), 0.5)  # one hiccup is no drift
        self._drift += (error - self._drift) / DRIFT_STEPS
        if abs(self._drift) > DRIFT:  # the load on the machine has changed
            fade = min(fade, KEPT_STEPS / self._count)
        # By what was predicted, not by the time: else a slow step would count less than a fast one.
        scaled = features / (NOISE * predicted)
        self._count = fade * self._count + 1
        target = time / (NOISE * predicted)
        _learn_step(
            scaled, target, fade, self._seen, self._told, self._trust, self._start, self.weights
        )
        return predicted

    def _features(self, work: StepWork) -> Floats:
        forward = self.curve.between(work.tokens, work.tokens)[0]
        return np.array([forward, 1.0, work.nodes > 0, *work[1:]])

    def prices(
        self, contexts: Words, load: Load, num_nodes: int
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
    whatever noise says: no weight falls below LEAST_PART of its start. `trust` float64 [n] is the
    diagonal of its matrix, above 0. By Gauss and Seidel's method, from the last weights on.
    """
    n = len(features)
    for i in range(n):
        told[i] = fade * told[i] + features[i] * target
        for j in range(n):
            seen[i, j] = fade * seen[i, j] + features[i] * features[j]
    for _ in range(SWEEPS):
        for i in range(n):
            rest = told[i] + trust[i] * start[i]
            for j in range(n):
                if j != i:
                    rest -= seen[i, j] * weights[j]
            weights[i] = max(rest / (seen[i, i] + trust[i]), LEAST_PART * start[i])


class Allotment(NamedTuple):
    """What each tree of a forest gets."""

    sizes: Words
    """int64 [t]: so many of its first nodes,"""
    chained: NDArray[np.bool_]
    """bool [t]: or the best chain in them."""
    rate: float
    """Tokens that the step is expected to emit for each unit of time."""
    least: float
    """The probability below which no node of this step would have been sent."""


def allot(forest: DraftForest, contexts: Words, cost: StepCost, load: Load) -> Allotment:
    """Give each request the nodes with which the step emits the most per unit of time.

    A step is expected to emit a token for each decoding request and the sum of the probabilities
    of all nodes; the quotient of that and the step's time is maximised (Dinkelbach's method). A
    tree that is not worth its attention is cut to its best chain. Now and then, where not much is
    at stake, nothing is given, so that what a step without drafts costs stays known.

    Parameters
    ----------
    forest : DraftForest
        Trees whose `probs` fall or stay.
    contexts : int64 [t]
        The committed tokens of each tree's request.
    """
    base, forward, chain, tree, root = cost.prices(contexts, load, forest.num_nodes)
    decodes = len(forest) + load.decodes
    sizes, chained, rate, least = _allot(
        forest.probs,
        forest.parents,
        forest.firsts,
        forest.branching,
        decodes,
        base,
        forward,
        chain,
        tree,
        root,
    )
    if cost.drafting >= LOOK_AFTER and rate * base < WORTH_A_LOOK * decodes:
        sizes = np.zeros_like(sizes)
    return Allotment(sizes, chained, rate, least)


def compile_budget() -> None:
    """Run every kernel of this module on one node, so that no request waits for the compiler."""
    cost = StepCost(CostCurve([1], [1.0]))
    trees = DraftForest.of([DraftTree.chain([0])])
    allotment = allot(trees, np.array([1]), cost, Load())
    trees.cut(allotment.sizes, allotment.chained)
    cost.observe(StepWork(1, 1, 0, 0.0, 0.0, 0.0), 1.0)


@kernel
def _allot(
    probs: NDArray[np.float32],
    parents: Ints,
    firsts: Words,
    branching: NDArray[np.bool_],
    decodes: int,
    base: float,
    forward: Floats,
    chain: Floats,
    tree: Floats,
    root: Floats,
) -> tuple[Words, NDArray[np.bool_], float, float]:
    num_nodes, num_trees = len(probs), len(firsts) - 1
    owners = np.empty(num_nodes, np.int64)
    costs = np.empty(num_nodes)
    for i in range(num_trees):
        for node in range(firsts[i], firsts[i + 1]):
            owners[node] = i
            costs[node] = tree[i] if branching[i] else chain[i]
        if branching[i]:
            costs[firsts[i]] += root[i]
    rate = decodes / base
    best = 0
    gains = np.empty(num_nodes)
    order = np.arange(num_nodes)
    for _ in range(8):
        for node in range(num_nodes):
            # The root's part must not change the order within a tree.
            extra = tree[owners[node]] if branching[owners[node]] else chain[owners[node]]
            gains[node] = probs[node] - rate * extra
        order = np.argsort(-gains, kind="mergesort")
        emitted, time = float(decodes), base
        best, most = 0, decodes - rate * base
        best_rate = decodes / base
        for k in range(num_nodes):
            emitted += probs[order[k]]
            time += costs[order[k]]
            value = emitted - rate * (time + forward[k + 1])
            if value > most + 1e-12:
                best, most = k + 1, value
                best_rate = emitted / (time + forward[k + 1])
        if best_rate <= rate * (1 + 1e-9):
            break
        rate = best_rate
    sizes = np.zeros(num_trees, np.int64)
    for k in range(best):
        sizes[owners[order[k]]] += 1
    chained = np.zeros(num_trees, np.bool_)
    kept = best
    for i in range(num_trees):
        if not branching[i] or sizes[i] == 0 or chain[i] >= tree[i]:
            continue
        lost, length, tip = 0.0, 0, -1
        for place in range(sizes[i]):
            if parents[firsts[i] + place] == tip:
                tip = place
                length += 1
            else:
                lost += probs[firsts[i] + place]
        saved = sizes[i] * tree[i] - length * chain[i] + root[i]
        saved += forward[kept] - forward[kept - sizes[i] + length]
        if rate * saved > lost:
            chained[i] = True
            kept -= sizes[i] - length
    least = 0.0
    if best < num_nodes:
        ahead = min(num_nodes, best + 8)
        cheapest = min(chain.min(), tree.min())
        least = rate * (cheapest + (forward[ahead] - forward[best]) / (ahead - best))
    return sizes, chained, rate, least
