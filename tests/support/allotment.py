"""The nodes that a step of a given cost sends."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lookahead_vllm.draft.budget import allot as budget
from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.draft.proposers.proposer import NO_LOAD
from lookahead_vllm.draft.tree import DraftForest, DraftTree


class Allotment(NamedTuple):
    """As `budget.allot` returns it."""

    forest: DraftForest
    rate: float
    min_prob: float


def allot(forest: DraftForest, contexts: Int64s, cost: StepCost, load: Load) -> Allotment:
    """Allot with the prices of the forest's nodes."""
    prices = cost.prices(contexts, load, forest.num_nodes)
    fields, rate, min_prob = budget.allot(forest.arrays, load.plain_tokens(len(forest)), prices[:])
    return Allotment(DraftForest(*fields), rate, min_prob)


def chains(*rows: Sequence[float]) -> DraftForest:
    """A chain for each list of probabilities; all tokens are 7."""
    return DraftForest.of([DraftTree.chain([7] * len(row), row) for row in rows])


def allot_chains(
    rows: Sequence[Sequence[float]], cost: StepCost, load: Load = NO_LOAD
) -> Allotment:
    """Allot chains of these probabilities, with nothing before them."""
    return allot(chains(*rows), np.zeros(len(rows), np.int64), cost, load)
