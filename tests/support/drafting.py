"""What a proposer drafts for one request, and how a model answers it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.proposers.proposer import Proposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees
from lookahead_vllm.draft.tree import DraftTree

Seen = set[tuple[int, int, int]]
"""Of tokens: the distance to a token before it, that token, and the token itself."""


def draft(
    proposer: Proposer,
    request_id: str = "r",
    max_nodes: int = 16,
    max_depth: int = 64,
    may_branch: bool = True,
) -> DraftTree:
    return draft_trees(proposer, [DraftLimits(request_id, max_nodes, max_depth, may_branch)])[0]


def paths(tree: DraftTree) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def answer(
    tree: DraftTree, at_root: int, at_nodes: Sequence[int]
) -> tuple[list[int], NDArray[np.bool_]]:
    """The tokens that a model emits which chooses these after the root and after each node, and
    whether each node is accepted."""
    emitted, accepted = [at_root], np.zeros(len(tree), np.bool_)
    here = -1
    for node, chosen in enumerate(at_nodes):
        if tree.parents[node] == here and tree.tokens[node] == emitted[-1]:
            here, accepted[node] = node, True
            emitted.append(chosen)
    return emitted, accepted


def seen_in(text: list[int], first: int) -> Seen:
    """The tokens of `text` from index `first`, each with the last token before it and with the
    last but one."""
    return {
        (distance, text[at - distance], text[at])
        for at in range(first, len(text))
        for distance in (1, 2)
        if at >= distance
    }


def check_all_were_seen(tree: DraftTree, text: list[int], seen: Seen) -> None:
    """Fail if a token was seen at the same distance from neither of the two before it.

    A suffix of the trie has the last token, or the last but one without the last.
    """
    for path in paths(tree):
        *before, token = text + path
        assert {(1, before[-1], token), (2, before[-2], token)} & seen
