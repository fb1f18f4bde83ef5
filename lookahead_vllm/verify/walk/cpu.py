"""The walk through each request's tree, in one compiled call for tensors on a CPU."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.verify.walk import Walk


def walk_rows(rows: Sequence[Tensor], cu_num_logits: Tensor, out: Walk) -> None:
    """Write `out`, by the ids, sampled tokens, parents and indices of the rows, as in `walk.walk`.

    Raises
    ------
    ValueError
        A request has more rows than `out` is wide.
    """
    ids, sampled, parents, logits_indices = rows
    width = out.tokens.shape[1]
    read = ids.long(), sampled, parents, cu_num_logits, logits_indices.long()
    most = _walk(*(part.numpy() for part in read), Walk(*(part.numpy() for part in out)))
    if most > width:
        raise ValueError(f"a request has {most} logits rows, more than the width of {width}")


@kernel
def _walk(
    ids: Int64s,
    sampled: Int64s,
    parents: Int32s,
    cu_num_logits: Int32s,
    logits_indices: Int64s,
    out: Walk,
) -> int:
    """Returns the most rows of a request; requests with more rows than fit are left out."""
    most = 0
    depths = np.empty(len(ids), np.int32)  # -1: rejected
    tokens, num_sampled, order, origins, targets = out
    tokens[:] = 0
    for row in range(len(order)):
        order[row] = row
    for request in range(len(num_sampled)):
        first, end = cu_num_logits[request], cu_num_logits[request + 1]
        most = max(most, end - first)
        if end == first or end - first > tokens.shape[1]:
            num_sampled[request] = 0
            origins[request] = 0
            targets[request] = 0
            continue
        depths[first], last = 0, first
        for row in range(first + 1, end):  # parents precede their children
            parent = parents[row]
            depths[row] = -1
            if depths[parent] >= 0 and ids[row] == sampled[parent]:
                depths[row] = depths[parent] + 1
                if depths[row] > depths[last]:
                    last = row
        root = logits_indices[first]
        num_sampled[request] = depths[last] + 1
        origins[request] = root
        targets[request] = root
        row = last
        for depth in range(depths[last], -1, -1):
            tokens[request, depth] = sampled[row]
            order[first + depth] = row
            if logits_indices[row] != root + depth:
                origins[request, depth] = logits_indices[row]
                targets[request, depth] = root + depth
            row = parents[row]
    return most
