"""Attention over a paged KV cache by xformers, where some requests have draft trees.

Rows attend to their context, page by page, and to their draft block under a bias; the log-sum-exps
of both merge them. xformers has this for equal trees (`xformers.ops.tree_attention`); here each
request has its own. Its kernel (split-K, in Triton) is compiled for numbers of requests, rows and
pages, so all three are rounded up to powers of two.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from lookahead_vllm.verify.gpu.paged_batch import CAUSAL, PagedBatch, PagedCall

HEAD_SIZES = (16, 32, 64, 128, 256)
"""Those of the kernel."""

_MIN_ROWS = 16  # of a product of matrices on tensor cores
_BLOCK = 64  # the most tokens that the kernel reads at once; they are in one page


def obstacle(call: PagedCall) -> str | None:
    """Why xformers cannot compute this call, or None if it can."""
    head_size = call.query.shape[2]
    if find_spec("xformers") is None:
        return "xformers is not installed; install lookahead-vllm[xformers]"
    release = triton.__version__
    if tuple(map(int, release.split(".")[:2])) >= (3, 9):
        return f"xformers' kernel needs block pointers, which Triton {release} does not have"
    if call.query.dtype == torch.float32:
        return "xformers has no attention over pages in float32"
    if call.key_cache.dtype != call.query.dtype:
        return f"xformers reads no KV cache of {call.key_cache.dtype}"
    if head_size not in HEAD_SIZES:
        return f"xformers has no heads of {head_size}, only of {', '.join(map(str, HEAD_SIZES))}"
    if call.sliding_window > 0 or call.alibi_slopes is not None:
        return "xformers has no sliding window of a tree, and no ALiBi"
    if call.logits_soft_cap or call.sinks is not None:
        return "xformers has no soft caps and no sinks"
    if call.context_lse is not None:
        return "xformers attends to contexts itself"
    return None


def attend(call: PagedCall) -> None:
    """See `paged_attention`.

    Raises
    ------
    ValueError
        xformers cannot compute this.
    """
    if reason := obstacle(call):
        raise ValueError(reason)
    from xformers.ops import fmha

    requests, starts, sizes, contexts, firsts = _entries(call.batch)
    count, size = len(sizes), max(_MIN_ROWS, triton.next_power_of_2(call.batch.max_size))
    _, heads, head_size = call.query.shape
    page, kv_heads = call.key_cache.shape[1:3]
    group = heads // kv_heads
    # The rows after a request's last one repeat it.
    places = torch.arange(size, device=call.query.device)
    rows = torch.minimum(places, (sizes - 1).clamp(min=0)[:, None])
    tokens = starts[:, None] + rows
    query = call.query[tokens].view(count, size, kv_heads, group, head_size)
    operator = _operator(page)

    keys, values, factor = _tokens_of(call)
    of_contexts, context_lse = fmha.memory_efficient_attention_partial(
        query.view(1, count * size, kv_heads, group, head_size),
        keys.expand(1, -1, kv_heads, group, head_size),
        values.expand(1, -1, kv_heads, group, head_size),
        _context_mask(call, requests, contexts, size, factor),
        scale=call.scale,
        op=operator,
    )

    slots = contexts[:, None] + rows
    blocks = call.block_table[requests[:, None], slots // page]
    drafted = [
        part[blocks, slots % page][:, :, :, None].expand(query.shape)
        for part in (call.key_cache, call.value_cache)
    ]
    bias = _block_bias(call.batch, rows, firsts, query.dtype)
    of_blocks, block_lse = fmha.memory_efficient_attention_partial(
        query, *drafted, bias.expand(-1, kv_heads, group, -1, -1), scale=call.scale, op=operator
    )

    context_lse = context_lse.view(kv_heads, group, count, size).permute(2, 0, 1, 3)
    merged, _ = fmha.merge_attentions(
        torch.stack((of_contexts.view(query.shape), of_blocks)),
        torch.stack((context_lse.float(), block_lse.float())),
        write_lse=False,
        output_dtype=query.dtype,
    )
    output = call.output.view(len(call.output), heads, head_size)
    is_used = (sizes > 0)[:, None, None, None]
    output[tokens] = torch.where(is_used, merged.reshape(count, size, heads, -1), output[tokens])


def _entries(batch: PagedBatch) -> Tensor:
    """Requests, starts, sizes, contexts and firsts, int32 [5, a power of two].

    Entries without rows are copies of the first one.
    """
    columns = batch.requests, batch.starts, batch.sizes, batch.contexts, batch.firsts
    unused = triton.next_power_of_2(len(batch)) - len(batch)
    packed = pad(torch.stack(columns), (0, unused))
    entries = torch.arange(packed.shape[1], device=packed.device)
    return packed[:, torch.where(packed[2] > 0, entries, 0)]


@cache
def _operator(page_size: int) -> Any:
    """xformers' split-K attention, reading as many tokens at once as fit into a page."""
    from xformers.ops.fmha import triton_splitk

    block = _BLOCK
    while page_size % block:
        block //= 2
    return type("PagedSplitK", (triton_splitk.FwOp,), {"BLOCK_N": block})


def _tokens_of(call: PagedCall) -> tuple[Tensor, Tensor, int]:
    """Keys and values as one text [1, tokens, KV heads, 1, head size], and the number of pages of
    this text from one block to the next: 1 if memory has the tokens of a block first, the KV
    heads if it has the heads first."""
    blocks, page, heads, head_size = call.key_cache.shape
    texts = []
    for part in (call.key_cache, call.value_cache):
        of_block, of_token, of_head, _ = part.stride()
        factor, rest = divmod(of_block, page * of_token)
        assert not rest, part.stride()
        shape = 1, ((blocks - 1) * factor + 1) * page, heads, 1, head_size
        texts.append(part.as_strided(shape, (0, of_token, of_head, 0, 1)))
    return *texts, factor


def _context_mask(
    call: PagedCall, requests: Tensor, contexts: Tensor, size: int, factor: int
) -> Any:
    """Each request's `size` rows attend to its context; without a synchronisation."""
    page, width = call.key_cache.shape[1], call.block_table.shape[1]
    pages = triton.next_power_of_2(max(1, triton.cdiv(call.batch.max_context, page)))
    pages = min(pages, width)
    on_host = _mask_on_host(len(requests), size, pages, page)
    end = len(requests) * size + 1
    ends = torch.arange(0, end, size, dtype=torch.int32, device=contexts.device)
    return replace(
        on_host,
        q_seqinfo=replace(on_host.q_seqinfo, seqstart=ends),
        k_seqinfo=replace(on_host.k_seqinfo, seqlen=contexts),
        block_tables=call.block_table[requests, :pages] * factor,
    )


@cache
def _mask_on_host(requests: int, size: int, pages: int, page_size: int) -> Any:
    """xformers' mask of so many requests with equal rows and contexts."""
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

    return PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [size] * requests,
        [pages * page_size] * requests,
        torch.zeros(requests, pages, dtype=torch.int32),
        page_size,
        device=torch.device("cpu"),
    )


def _block_bias(batch: PagedBatch, rows: Tensor, firsts: Tensor, dtype: torch.dtype) -> Tensor:
    """[requests, 1, 1, size, size]: 0 where a row attends to another one, else -inf."""
    size, words = rows.shape[1], batch.masks.shape[1]
    places = torch.arange(size, device=rows.device)
    masks = pad(batch.masks, (0, max(0, triton.cdiv(size, 32) - words), 0, 1))  # there may be none
    own = masks[(firsts[:, None] + rows).clamp(0, len(masks) - 1)]  # any rows, for a causal request
    bits = own[:, :, places // 32] >> places % 32 & 1
    attended = torch.where((firsts == CAUSAL)[:, None, None], places <= rows[:, :, None], bits > 0)
    bias = torch.zeros(attended.shape, dtype=dtype, device=rows.device)
    return bias.masked_fill_(~attended, -torch.inf)[:, None, None]
