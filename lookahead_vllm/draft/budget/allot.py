"""Allotment of a step's draft nodes: the cut that emits the most tokens per unit of time."""

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.cost import StepCost, StepPrices
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.tree import ForestArrays, ForestFields, find_branching, take_nodes

PROBE_AFTER_STEPS = 64
"""After this many steps with drafts, some are run that do not wait for any, to refresh the cost of
a step without drafts."""

PROBE_BELOW_SPEEDUP = 1.3
"""They are run if drafts promise less than this many times the plain tokens per time."""


def is_worth_waiting(cost: StepCost, speedup: float) -> bool:
    """Whether steps should go on to wait for late drafts, if one has this `speedup`.

    Every now and then, steps without drafts are run to refresh their cost.
    """
    is_due = cost.steps_since_plain >= PROBE_AFTER_STEPS
    return speedup >= (PROBE_BELOW_SPEEDUP if is_due else 1.0)


@kernel
def allot(
    forest: ForestArrays, plain_tokens: int, prices: StepPrices
) -> tuple[ForestFields, float, float]:
    """Choose the nodes with which the step emits the most tokens per unit of time.

    A step is expected to emit one token for each decoding request plus the sum of the probabilities
    of its nodes. Dinkelbach's method maximises the quotient of that and the step's time. A tree
    that is not worth its attention is cut to its best chain.

    Parameters
    ----------
    forest : ForestArrays
        Trees whose `probs` never rise from one node to the next.
    plain_tokens : int
        `Load.plain_tokens`.
    prices : StepPrices
        For at least the forest's nodes; with NO_PRICES, all of them are sent.

    Returns
    -------
    ForestFields, float, float
        The nodes that are sent; the expected number of tokens per unit of time, 0 if there were no
        nodes or no prices; and the probability below which no further node would have been sent, 0
        if all are sent.
    """
    forest, prices = ForestArrays(*forest), StepPrices(*prices)
    if len(forest.tokens) == 0 or len(prices.forward) == 0:
        fields = forest.tokens, forest.parents, forest.probs, forest.depths, forest.sources
        return (*fields, forest.firsts), 0.0, 0.0
    branching = find_branching(forest.parents, forest.firsts)
    sizes, chained, rate, min_prob = _allot(
        forest.probs, forest.parents, forest.firsts, branching, plain_tokens, prices
    )
    trees = np.arange(len(sizes))
    kept, parents, firsts = take_nodes(forest.parents, forest.firsts, trees, sizes, chained)
    return (
        (
            forest.tokens[kept],
            parents,
            forest.probs[kept],
            forest.depths[kept],
            forest.sources[kept],
            firsts,
        ),
        rate,
        min_prob,
    )


@kernel
def _allot(
    probs: NDArray[np.float32],
    parents: Int32s,
    firsts: Int64s,
    branching: NDArray[np.bool_],
    plain_tokens: int,
    prices: StepPrices,
) -> tuple[Int64s, NDArray[np.bool_], float, float]:
    """The nodes taken from the front of each tree, int64 [t]; whether only the best chain among
    them is sent, bool [t]; the last two results of `allot`."""
    base, _, forward, chain, tree, root, captured = prices
    num_nodes = len(probs)
    # What a node costs beside the forward pass, and with its tree's root, if it is the first one.
    extra, costs = np.empty(num_nodes), np.empty(num_nodes)
    owners = np.empty(num_nodes, np.int64)
    for i in range(len(firsts) - 1):
        own = slice(firsts[i], firsts[i + 1])
        owners[own], extra[own] = i, tree[i] if branching[i] else chain[i]
        costs[own] = extra[own]
        if branching[i]:
            costs[firsts[i]] += root[i]
    order, best, rate = _best_nodes(probs, extra, costs, plain_tokens, base, forward)
    sizes = np.zeros(len(firsts) - 1, np.int64)
    for k in range(best):
        sizes[owners[order[k]]] += 1
    chained = _better_as_chains(probs, parents, firsts, branching, sizes, rate, prices)
    min_prob = 0.0
    if best < num_nodes:
        cheapest = min(chain.min(), tree.min())
        min_prob = rate * (cheapest + _price_of_next(forward, best, num_nodes, captured))
        if best > 0:
            # Where the price rises steeply after the last node sent, one as likely can pay again.
            min_prob = min(min_prob, probs[order[best - 1]])
    return sizes, chained, rate, min_prob


@kernel
def _best_nodes(
    probs: NDArray[np.float32],
    extra: NDArray[np.float64],
    costs: NDArray[np.float64],
    plain_tokens: int,
    base: float,
    forward: NDArray[np.float64],
) -> tuple[Int64s, int, float]:
    """The nodes by falling gain, how many of them are sent, and the tokens a second of that step,
    by Dinkelbach's method: the gain of a node depends on the rate, which rises until it is the
    best."""
    num_nodes = len(probs)
    rate = plain_tokens / base
    best = 0
    gains = np.empty(num_nodes)
    order = np.arange(num_nodes)
    for turn in range(8):
        # The root's cost is left out: it would change the order of nodes within a tree.
        for node in range(num_nodes):
            gains[node] = probs[node] - rate * extra[node]
        if turn:
            _sort_again(order, gains)
        else:
            order = np.argsort(-gains, kind="mergesort")
        emitted, time = float(plain_tokens), base
        best, best_value = 0, plain_tokens - rate * base
        best_rate = plain_tokens / base
        for k in range(num_nodes):
            emitted += probs[order[k]]
            time += costs[order[k]]
            value = emitted - rate * (time + forward[k + 1])
            if value > best_value + 1e-12:
                best, best_value = k + 1, value
                best_rate = emitted / (time + forward[k + 1])
        if best_rate <= rate * (1 + 1e-9):
            break
        rate = best_rate
    return order, best, rate


@kernel
def _better_as_chains(
    probs: NDArray[np.float32],
    parents: Int32s,
    firsts: Int64s,
    branching: NDArray[np.bool_],
    sizes: Int64s,
    rate: float,
    prices: StepPrices,
) -> NDArray[np.bool_]:
    """Of which trees, cut to `sizes`, the best chain is worth more than all nodes, bool [t]."""
    _, _, forward, chain, tree, root, _ = prices
    chained = np.zeros(len(sizes), np.bool_)
    kept = sizes.sum()
    for i in range(len(sizes)):
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
    return chained


@kernel
def _sort_again(order: Int64s, gains: NDArray[np.float64]) -> None:
    """As a stable sort by falling gain, of an order in which little has changed."""
    for k in range(1, len(order)):
        node, place = order[k], k
        while place > 0:
            before = order[place - 1]
            if gains[before] > gains[node] or (gains[before] == gains[node] and before < node):
                break
            order[place] = before
            place -= 1
        order[place] = node


@kernel
def _price_of_next(
    forward: NDArray[np.float64], sent: int, num_nodes: int, captured: bool
) -> float:
    """Average cost that each further node adds to the forward pass after `sent` nodes."""
    if not captured:
        ahead = min(num_nodes, sent + 8)
        return float((forward[ahead] - forward[sent]) / (ahead - sent))
    # The cheapest plateau ahead, even if there are too few nodes to fill it.
    price = np.inf
    last = forward[min(num_nodes + 1, len(forward) - 1)]
    for ahead in range(sent + 1, len(forward)):
        if forward[ahead] > last:
            break
        price = min(price, (forward[ahead] - forward[sent]) / (ahead - sent))
    return float(max(price, 0.0))
