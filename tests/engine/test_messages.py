"""Runners verify the proposed trees, cut to the nodes that were scheduled."""

from __future__ import annotations

import pytest

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.messages import SentDraft, recall

TREES = {
    "a": DraftTree.from_lists([1, 2, 3, 4], [-1, -1, 0, 1], [0.9, 0.5, 0.4, 0.1], [0, 1, 2, 0]),
    "b": DraftTree.from_lists([5, 6, 7], [-1, 0, 0]),
}
LATER = {"c": DraftTree.from_lists([8, 9], [-1, -1])}


def sent(trees: dict[str, DraftTree]) -> dict[str, SentDraft]:
    forest = DraftForest.of(list(trees.values()))
    return {
        req_id: SentDraft(forest, place, tree.tokens.tolist())
        for place, (req_id, tree) in enumerate(trees.items())
    }


def fields_of(tree: DraftTree) -> list[list[float]]:
    fields = (tree.tokens, tree.parents, tree.probs, tree.depths, tree.sources)
    return [field.tolist() for field in fields]


def scheduled_of(trees: list[DraftTree]) -> dict[str, list[int]]:
    """By request id, in another order than that of the proposals."""
    return {req_id: tree.tokens.tolist() for req_id, tree in zip("cba", trees, strict=True)}


CHAIN = DraftTree.chain([5, 6])
FOREIGN = DraftTree.chain([40, 41])
GRAMMARS = DraftTree.from_lists([5, 50, 51], [-1, -1, 1])


@pytest.mark.parametrize(
    ("trees", "replacements", "from_proposer"),
    [
        ([LATER["c"], TREES["b"], TREES["a"]], {}, [True, True, True]),
        ([LATER["c"].prefix(1), TREES["b"].prefix(2), TREES["a"].prefix(3)], {}, [True] * 3),
        ([LATER["c"], FOREIGN, TREES["a"]], {}, [True, False, True]),
        ([LATER["c"], GRAMMARS, TREES["a"]], {"b": GRAMMARS}, [True, False, True]),
        ([LATER["c"], GRAMMARS.prefix(2), TREES["a"]], {"b": GRAMMARS}, [True, False, True]),
        # The tokens are those of a proposed tree, but the replacement is a chain.
        ([LATER["c"], CHAIN, TREES["a"]], {"b": CHAIN}, [True, False, True]),
    ],
)
def test_scheduled_trees_are_recalled(
    trees: list[DraftTree],
    replacements: dict[str, DraftTree],
    from_proposer: list[bool],
) -> None:
    forest, matches = recall(scheduled_of(trees), sent(TREES) | sent(LATER), replacements)
    assert matches.tolist() == from_proposer
    assert [fields_of(tree) for tree in forest] == [fields_of(tree) for tree in trees]


def test_the_drafts_of_one_step_are_recalled_together() -> None:
    forest, from_proposer = recall({"b": [5, 6], "a": [1]}, sent(TREES), {})
    assert from_proposer.all() and forest.firsts.tolist() == [0, 2, 3]
    assert fields_of(forest[0]) == fields_of(TREES["b"].prefix(2))
