"""The nodes that a step of a given cost sends."""

from typing import NamedTuple

from lookahead_vllm.draft.budget import allot as budget
from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.draft.tree import DraftForest


class Allotment(NamedTuple):
    """As `budget.allot` returns it."""

    forest: DraftForest
    rate: float
    min_prob: float


def allot(forest: DraftForest, contexts: Int64s, cost: StepCost, load: Load) -> Allotment:
    """Allot with the prices of the forest's nodes."""
    prices = cost.prices(contexts, load, forest.num_nodes)
    fields, rate, min_prob = budget.allot(forest.arrays, load.progress(len(forest)), prices[:])
    return Allotment(DraftForest(*fields), rate, min_prob)
