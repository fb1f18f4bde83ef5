"""The nodes that a step of a given cost sends."""

from lookahead_vllm.draft.budget.allot import Allotment
from lookahead_vllm.draft.budget.allot import allot as allot_at_prices
from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.draft.tree import DraftForest


def allot(
    forest: DraftForest, contexts: Int64s, cost: StepCost, load: Load, more: int = 0
) -> Allotment:
    """Allot with the prices of the forest's nodes, and of `more` nodes."""
    prices = cost.prices(contexts, load, forest.num_nodes + more)
    progress = load.progress(len(forest))
    return allot_at_prices(forest, progress, prices)
