"""Which nodes a step sends: the cut that emits the most tokens in its time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.cost import CostCurve, Floats, Load, StepCost, StepWork
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import DraftForest, DraftTree

PROBE_AFTER_STEPS = 16  # steps in a row with drafts that promise less than
PROBE_BELOW_SPEEDUP = (
    1.3  # times the tokens per time of a plain step, what one costs is looked at again
)


class Allotment(NamedTuple):
    """What each tree of a forest gets."""

    sizes: Int64s
    """int64 [t]: so many of its first nodes,"""
    chained: NDArray[np.bool_]
    """bool [t]: or the best chain in them."""
    rate: float
    """Tokens that the step is expected to emit for each unit of time."""
    least: float
    """The probability below which no node of this step would have been sent."""


def allot(forest: DraftForest, contexts: Int64s, cost: StepCost, load: Load) -> Allotment:
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
    if cost.drafting >= PROBE_AFTER_STEPS and rate * base < PROBE_BELOW_SPEEDUP * decodes:
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
    parents: Int32s,
    firsts: Int64s,
    branching: NDArray[np.bool_],
    decodes: int,
    base: float,
    forward: Floats,
    chain: Floats,
    tree: Floats,
    root: Floats,
) -> tuple[Int64s, NDArray[np.bool_], float, float]:
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
