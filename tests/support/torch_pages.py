"""Attention over pages as a GPU has them, [blocks, heads, size, K and V], in plain torch."""

from torch import Tensor, arange, full, inf, tanh


def write(kv: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Write K and V of rows, [rows, heads, K and V]; a slot of -1 is padding."""
    used, size = slots >= 0, cache.shape[2]
    cache[slots[used] // size, :, slots[used] % size] = kv[: len(slots)][used]


def attend(
    query: Tensor, cache: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, scale: float,
    is_causal: bool, output: Tensor, soft_cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Write the attention of each request's rows to its pages.

    Parameters
    ----------
    query, output
        [rows, heads, head size]
    starts, lengths, table
        By request: its first row and, behind the last one, the end; the slots of its text, in which
        the last ones are its rows' if it is causal; its blocks.

    Returns
    -------
    Tensor
        The logarithms of the sums of the weights, [heads, rows].
    """
    lse, size = full((query.shape[1], len(query)), -inf), cache.shape[2]
    ends = starts.tolist()
    for request, length in enumerate(lengths.tolist()):
        own = slice(ends[request], ends[request + 1])
        if not (rows := own.stop - own.start):
            continue
        slots = arange(length)
        kv = cache[table[request, slots // size].long(), :, slots % size].transpose(0, 1)
        kv = kv.repeat_interleave(query.shape[1] // len(kv), 0)
        keys, values = kv.split(query.shape[2], dim=-1)
        scores = query[own].transpose(0, 1) @ keys.transpose(1, 2) * scale
        if soft_cap:
            scores = soft_cap * tanh(scores / soft_cap)
        if is_causal:
            is_later = slots[None] > (length - rows + arange(rows))[:, None]
            scores.masked_fill_(is_later, -inf)
        lse[:, own] = scores.logsumexp(-1)
        output[own] = (scores.softmax(-1) @ values).transpose(0, 1)
    return lse
