"""Attention in plain PyTorch: the reference for every kernel on a GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lookahead_vllm.verify.attention import PagedCall
from lookahead_vllm.verify.layout.paged_batch import CAUSAL


def reference_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    context: int,
    depths: Tensor | None,
    masks: Tensor | None,
    *,
    scale: float,
    sliding_window: int,
    alibi_slopes: Tensor | None,
    soft_cap: float,
    sinks: Tensor | None,
    before: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of one request's rows, computed in the dtype of `k`: [rows, heads, head_size].

    The options are those of `tree_attention`. K and V that a row does not attend to have no effect,
    NaN and inf included.

    Parameters
    ----------
    query : [rows, heads, head_size]
    k, v : float32 or float64 [kv_heads, keys, head_size]
        Of the last slots of the request; those before them are out of the window.
    context : int
        Tokens before the rows.
    depths, masks : int32 [rows], int32 [rows, words], or None
        Of the rows of a tree, as in TreeBatch. None: the rows are a chain or a prompt.
    before : [rows, heads, head_size] and [heads, rows], optional
        The rows' attention to what is not among the keys, and the logarithms of the sums of its
        exponentials: both are merged. Not with sinks.
    """
    kv_heads, num_keys, _ = k.shape
    rows = len(query)
    nodes = torch.arange(rows, device=k.device)
    in_mask = nodes <= nodes[:, None]
    if depths is None or masks is None:
        depths = nodes
    else:
        in_mask = (masks[:, nodes // 32] >> nodes % 32 & 1).bool()
    positions = torch.arange(context + rows - num_keys, context + rows, device=k.device)
    positions[num_keys - rows :] = context + depths
    distance = positions - (context + depths)[:, None]
    allowed = torch.ones(rows, num_keys, dtype=torch.bool, device=k.device)
    allowed[:, num_keys - rows :] = in_mask
    if sliding_window > 0:
        allowed &= distance > -sliding_window
    q = query.unflatten(1, (kv_heads, -1)).transpose(0, 1)
    group = q.shape[2]
    scores = (q.flatten(1, 2).to(k.dtype) * scale) @ k.transpose(1, 2)
    scores = scores.unflatten(1, (rows, group))  # [kv_heads, rows, group, keys]
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        scores += alibi_slopes.view(kv_heads, 1, group, 1) * distance.to(k.dtype)[:, None, :]
    scores = scores.masked_fill(~allowed[:, None, :], -torch.inf)
    if sinks is not None:
        sink = sinks.view(kv_heads, 1, group, 1).expand(-1, rows, -1, -1)
        scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
    if before is not None:
        lse = before[1].unflatten(0, (kv_heads, group)).transpose(1, 2)
        scores = torch.cat((scores, lse[..., None]), dim=-1)
    weights = scores.softmax(dim=-1)
    own = weights[..., :num_keys].flatten(1, 2)
    result = _weighted_sum(own, v, allowed.repeat_interleave(group, dim=0))
    result = result.unflatten(1, (rows, group))
    if before is not None:
        of_others = before[0].unflatten(1, (kv_heads, group)).transpose(0, 1)
        result += weights[..., num_keys:] * of_others
    return result.transpose(0, 1).flatten(1, 2)


def _weighted_sum(weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """`weights` [kv_heads, rows, keys] @ `v` [kv_heads, keys, head_size], over `allowed` keys only.

    The weights of other keys are 0, but 0 * NaN is NaN. `allowed` is [rows, keys].
    """
    finite = v.isfinite().all(-1)
    if finite.all():
        return weights @ v
    result = weights @ v.masked_fill(~finite[..., None], 0)
    for head, key in (~finite & allowed.any(0)).nonzero().tolist():
        attending = allowed[:, key]
        result[head, attending] += weights[head, attending, key, None] * v[head, key]
    return result


def attend(call: PagedCall) -> None:
    """See `paged_attention`. Synchronises with the device."""
    output = call.output.view(len(call.output), *call.query.shape[1:])
    for start, rows in reference_paged_attention(call):
        output[start : start + len(rows)] = rows.to(output.dtype)


def reference_paged_attention(
    call: PagedCall, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[int, Tensor]]:
    """Yield each request's first row in the query, and the attention of its rows.

    The attention is [rows, heads, head_size] of `dtype`. Synchronises with the device.
    """
    query, key_cache, value_cache, output, block_table, batch = call[:6]
    window, lse = call.sliding_window, call.context_lse
    if lse is not None:
        output = output.view(len(output), *query.shape[1:])
    block_size = key_cache.shape[1]
    for row, start, size, context, first in torch.stack(
        (batch.requests, batch.starts, batch.sizes, batch.contexts, batch.firsts), dim=1
    ).tolist():
        if not size:
            continue
        oldest = max(0, context - window + 1) if window > 0 else 0
        if lse is not None:
            oldest = context
        slots = torch.arange(oldest, context + size, device=query.device)
        blocks = block_table[row, slots // block_size].long()
        k = key_cache[blocks, slots % block_size].to(dtype)
        v = value_cache[blocks, slots % block_size].to(dtype)
        if call.k_scale is not None and call.v_scale is not None:
            k, v = k * call.k_scale, v * call.v_scale
        is_tree, own = first != CAUSAL, slice(first, first + size)
        rows = slice(start, start + size)
        yield (
            start,
            reference_attention(
                query[rows],
                k.transpose(0, 1),
                v.transpose(0, 1),
                context,
                batch.depths[own] if is_tree else None,
                batch.masks[own] if is_tree else None,
                scale=call.scale,
                sliding_window=window,
                alibi_slopes=call.alibi_slopes,
                soft_cap=call.soft_cap,
                sinks=call.sinks,
                before=None if lse is None else (output[rows].to(dtype), lse[:, rows].to(dtype)),
            ),
        )
