"""The walk through each request's tree, in one asynchronous launch."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lookahead_vllm.verify.walk import Walk

_BUFFERS = ["ids", "sampled", "parents", "logits_indices", "cu_num_logits"]
_RESULTS = ["tokens", "num_sampled", "order", "origins", "targets"]


def walk_rows(rows: Sequence[Tensor], cu_num_logits: Tensor, out: Walk) -> None:
    """Write `out`, by the ids, sampled tokens, parents and indices of the rows, as in `walk.walk`.

    Rows of a request beyond the width of `out` are never accepted, and their `order` is not
    written. There is one kernel for each power of two that the width rounds up to, from 16 on.
    """
    num_requests, width = out.tokens.shape
    _walk[(num_requests + 1,)](
        *(part.contiguous() for part in (*rows, cu_num_logits)), *out, len(rows[0]), width,
        BLOCK=max(16, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "width"],
    do_not_specialize_on_alignment=_BUFFERS + _RESULTS,
)
def _walk(
    ids, sampled, parents, logits_indices, cu_num_logits,
    tokens, num_sampled, order, origins, targets, num_rows, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each request, and one for the rows after those of all requests."""
    request = tl.program_id(0)
    first = tl.load(cu_num_logits + request)
    offset = tl.arange(0, BLOCK)
    if request == tl.num_programs(0) - 1:
        for start in range(first, num_rows, BLOCK):
            tl.store(order + start + offset, start + offset, mask=start + offset < num_rows)
        return
    in_width = offset < width
    cells = request.to(tl.int64) * width + offset
    size = tl.minimum(tl.load(cu_num_logits + request + 1) - first, width)
    if size == 0:
        tl.store(num_sampled + request, 0)
        tl.store(tokens + cells, 0, mask=in_width)
        tl.store(origins + cells, 0, mask=in_width)
        tl.store(targets + cells, 0, mask=in_width)
        return

    # All rows climb to the root at once. A row is accepted if every row on its way matches.
    row = first + offset
    is_row = offset < size
    here, depth, is_accepted = row, tl.zeros([BLOCK], tl.int32), is_row
    is_climbing = is_row & (offset > 0)
    steps = 0
    while (steps < size) & (tl.max(is_climbing.to(tl.int32), 0) > 0):
        parent = tl.load(parents + here, mask=is_climbing, other=0)
        token = tl.load(ids + here, mask=is_climbing, other=0)
        choice = tl.load(sampled + parent, mask=is_climbing, other=0)
        is_accepted = is_accepted & tl.where(is_climbing, token == choice, is_accepted)
        depth += is_climbing.to(tl.int32)
        here = tl.where(is_climbing, parent, here)
        is_climbing = is_climbing & is_accepted & (here != first)
        steps += 1
    # The deepest accepted row, the first one of several.
    best = tl.max(tl.where(is_accepted, depth * BLOCK + BLOCK - 1 - offset, -1), 0)
    deepest = best // BLOCK
    last = first + BLOCK - 1 - best % BLOCK

    root = tl.load(logits_indices + first).to(tl.int64)
    tl.store(num_sampled + request, deepest + 1)
    is_behind = offset > deepest
    tl.store(order + row, row, mask=is_row & is_behind)
    tl.store(tokens + cells, 0, mask=in_width & is_behind)
    tl.store(origins + cells, root, mask=in_width & is_behind)
    tl.store(targets + cells, root, mask=in_width & is_behind)
    cell = request.to(tl.int64) * width + deepest
    place = deepest
    while place >= 0:
        at = tl.load(logits_indices + last).to(tl.int64)
        is_moved = at != root + place
        tl.store(tokens + cell, tl.load(sampled + last))
        tl.store(order + first + place, last)
        tl.store(origins + cell, tl.where(is_moved, at, root))
        tl.store(targets + cell, tl.where(is_moved, root + place, root))
        last = tl.load(parents + last)
        cell -= 1
        place -= 1
