"""Acceptance on the device: the walk through each request's tree, after all nodes were sampled.

It finds the same paths as `acceptance.accepted_paths`, without a synchronisation: all shapes follow
from the arguments' shapes and from `width`, so a CUDA graph may contain it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lookahead_vllm.verify.devices import module_for


class Walk(NamedTuple):
    """The accepted paths of r requests with n logits rows, on the device of the arguments.

    A path begins with the request's root, row `cu_num_logits[i]`. Its further rows are the accepted
    nodes. The token sampled at each row of the path is emitted.
    """

    tokens: Tensor
    """int64 [r, width]: the emitted tokens of each request in order, then zeros."""
    num_sampled: Tensor
    """int32 [r]: the number of emitted tokens, 1 + accepted nodes; 0 for a request without rows,
    which is padding."""
    order: Tensor
    """int64 [n]: the rows of each path, moved to the front of the request's rows. The accepted rows
    of request i are `order[cu_num_logits[i] :][: num_sampled[i]]`; subtract `cu_num_logits[i] + 1`
    for indices of nodes within their tree. Every other entry is its own row."""
    origins: Tensor
    """int64 [r, width]: in column d, the index among the step's tokens of the d-th accepted node if
    its KV has to move, else that of the root."""
    targets: Tensor
    """int64 [r, width]: where that KV belongs, d places after the root; the root itself if nothing
    moves. So entries that move nothing map the root to itself. Both are 0 in a request without
    rows."""

    def places(self, cu_num_logits: Tensor) -> Tensor:
        """The place of each row of a path among its request's rows, the root's being 0.

        int64 [r, width]: the first `num_sampled` entries of a request are those of its path; the
        others are any. `cu_num_logits` is that of the walk.
        """
        firsts = cu_num_logits[:-1, None].long()
        columns = torch.arange(self.tokens.shape[1], device=firsts.device)
        return self.order[(firsts + columns).clamp(max=len(self.order) - 1)] - firsts


def walk(
    ids: Tensor,
    sampled: Tensor,
    parents: Tensor,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    width: int,
    out: Walk | None = None,
) -> Walk:
    """Follow the sampled tokens from each root as far as the tree goes.

    A node is accepted if its token was sampled at its parent and its parent is accepted. Where
    siblings have the same token, the deepest path wins, of these the first in list order.

    Parameters
    ----------
    ids : int32 or int64 [n]
        The token of each logits row; a root's is not read.
    sampled : int64 [n]
        The token sampled at each row.
    parents : int32 [n]
        The row of each row's parent, before the row itself and of the same request. A root, the
        first row of its request, is its own parent.
    cu_num_logits : int32 [r + 1]
        The first row of each request, then the number of rows; if that is below n, the rows after
        it are padding.
    logits_indices : int32 or int64 [n]
        The index of each row among the step's tokens; it grows by one from row to row of a request.
    width : int
        1 + the most nodes of any request, known on the host.
    out : Walk, optional
        Buffers for the result, as `empty_walk` makes them.
    """
    rows = ids, sampled, parents, logits_indices
    assert all(part.shape == (len(ids),) for part in rows), [part.shape for part in rows]
    assert {ids.dtype, logits_indices.dtype} <= {torch.int32, torch.int64}
    assert sampled.dtype == torch.int64 and parents.dtype == cu_num_logits.dtype == torch.int32
    out = out or empty_walk(len(ids), len(cu_num_logits) - 1, width, ids.device)
    module_for("walk", ids.device).walk_rows(rows, cu_num_logits, out)
    return out


def empty_walk(num_rows: int, num_requests: int, width: int, device: torch.device | str) -> Walk:
    """Buffers for `walk`, for n = `num_rows` and r = `num_requests`."""
    tokens, origins, targets = torch.empty(
        (3, num_requests, width), dtype=torch.int64, device=device
    ).unbind()
    num_sampled = torch.empty(num_requests, dtype=torch.int32, device=device)
    order = torch.empty(num_rows, dtype=torch.int64, device=device)
    return Walk(tokens, num_sampled, order, origins, targets)


def compile_walk(max_width: int, device: torch.device | str) -> None:
    """Compile what walks launch, by walks through a tree without nodes, up to `max_width`.

    There is a kernel for widths up to 16, and for each further power of two.
    """
    root = torch.zeros(1, dtype=torch.int64, device=device)
    ends = torch.arange(2, dtype=torch.int32, device=device)
    for power in range(4, max((max_width - 1).bit_length(), 4) + 1):
        walk(root.int(), root, root.int(), ends, root, 1 << power)
