"""Sample, then match: the walk that makes a draft tree lossless.

The target model's token is sampled at every node first, with the request's own sampling
parameters; then the walk goes from the root to the child that carries the sampled token, as far
as there is one. For drafts without probabilities of their own this is SpecInfer's multi-step
verification (section 4.3) and Algorithm 4 of Lookahead Decoding in distribution, with greedy
decoding as the special case.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead_vllm.draft.tree import DraftTree


def accepted_path(tree: DraftTree, choices: Sequence[int]) -> list[int]:
    """The nodes that the target model agrees with.

    Parameters
    ----------
    tree
        A draft of n nodes.
    choices
        n + 1 token ids: what the target model chose at the root, then at each node in list order.

    Returns
    -------
    list of int
        Indices of the accepted nodes from the root down; the tokens to emit are
        ``choices[0]`` and ``choices[i + 1]`` for each of them.
    """
    assert len(choices) == len(tree) + 1
    path: list[int] = []
    here, wanted = -1, choices[0]
    # Parents stand before children, so one pass meets the path's nodes in order.
    for i, (parent, token) in enumerate(
        zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ):
        if parent == here and token == wanted:
            path.append(i)
            here, wanted = i, choices[i + 1]
    return path
