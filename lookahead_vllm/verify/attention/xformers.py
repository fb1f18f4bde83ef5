"""Attention over a paged KV cache where xformers attends to the contexts.

Attention to a context and to a draft block are merged by their log-sum-exps, as in xformers'
`tree_attention`. That computes a block with K, V and a bias of its own for each request, padded to
the largest tree of all; here, the Triton kernel adds the blocks, from the pages.

xformers' kernel (split-K, in Triton) is compiled for numbers of requests, rows and pages, so all
three are rounded up to powers of two.
"""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from lookahead_vllm.verify.attention import PagedCall
from lookahead_vllm.verify.attention import triton as triton_attention

HEAD_SIZES = (16, 32, 64, 128, 256)
"""Those of the kernel."""

_BLOCK = 64
"""The most tokens that the kernel reads at once; they are in one page."""


def obstacle(call: PagedCall) -> str | None:
    """Why xformers cannot compute this call, or None if it can."""
    head_size, release = call.query.shape[2], triton.__version__
    if find_spec("xformers") is None:
        return "xformers is not installed; install lookahead-vllm[xformers]"
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
    if call.soft_cap or call.sinks is not None:
        return "xformers has no soft caps and no sinks"
    if call.context_lse is not None:
        return "xformers attends to contexts itself"
    page, (of_block, of_token, *_) = call.key_cache.shape[1], call.key_cache.stride()
    if of_block % (page * of_token):
        return "xformers needs pages without padding between them"
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

    _, heads, head_size = call.query.shape
    count = len(call.batch.tokens)
    tokens = pad(call.batch.tokens, (0, triton.next_power_of_2(count) - count), value=-1)
    page, kv_heads = call.key_cache.shape[1:3]
    own = kv_heads, heads // kv_heads, head_size
    keys, values, factor = _texts_of(call)
    attended, lse = fmha.memory_efficient_attention_partial(
        call.query[tokens.clamp(min=0)].view(1, -1, *own),
        keys.expand(1, -1, *own),
        values.expand(1, -1, *own),
        _mask_of(call, len(tokens), factor),
        scale=call.scale,
        op=_operator(page),
    )
    # Rows that are left over are written where the first row is written, and the same.
    first, is_used = tokens[:1], tokens >= 0
    rows = torch.where(is_used, torch.arange(len(tokens), device=tokens.device), 0)
    places = torch.where(is_used, tokens, first).clamp(min=0)
    output = call.output.view(len(call.output), heads, head_size)
    found = attended.reshape(-1, heads, head_size)[rows].to(output.dtype)
    output[places] = torch.where((first >= 0)[:, None, None], found, output[places])
    context_lse = torch.empty(heads, len(call.query), device=tokens.device)
    context_lse[:, places] = lse.reshape(heads, -1)[:, rows].float()
    triton_attention.attend(call._replace(context_lse=context_lse))


@cache
def _operator(page_size: int) -> Any:
    """xformers' split-K attention, reading as many tokens at once as fit into a page."""
    from xformers.ops.fmha import triton_splitk

    block = _BLOCK
    while page_size % block:
        block //= 2
    return type("PagedSplitK", (triton_splitk.FwOp,), {"BLOCK_N": block})


def _texts_of(call: PagedCall) -> tuple[Tensor, Tensor, int]:
    """Keys and values as one text [1, tokens, KV heads, 1, head size], and the number of its pages
    from one block to the next: 1 if memory has the tokens of a block first, the KV heads if it has
    the heads first."""
    blocks, page, heads, head_size = call.key_cache.shape
    texts = []
    for part in (call.key_cache, call.value_cache):
        of_block, of_token, of_head, _ = part.stride()
        factor = of_block // (page * of_token)
        shape = 1, ((blocks - 1) * factor + 1) * page, heads, 1, head_size
        texts.append(part.as_strided(shape, (0, of_token, of_head, 0, 1)))
    return *texts, factor


def _mask_of(call: PagedCall, rows: int, factor: int) -> Any:
    """All rows of a request attend to its whole context; made without a synchronisation."""
    batch, page = call.batch, call.key_cache.shape[1]
    entries = triton.next_power_of_2(len(batch))
    size = triton.next_power_of_2(batch.max_size)
    pages = triton.next_power_of_2(max(1, triton.cdiv(batch.max_context, page)))
    pages = min(pages, call.block_table.shape[1])
    columns = torch.stack((batch.requests, batch.sizes, batch.contexts))
    requests, sizes, contexts = pad(columns, (0, entries - len(batch)))
    on_host = _mask_on_host(entries, size, pages, page)
    ends = pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    return replace(
        on_host,
        # The last end on the host is checked against the query; the others are not read.
        q_seqinfo=replace(on_host.q_seqinfo, seqstart=ends, seqstart_py=[0, rows]),
        k_seqinfo=replace(on_host.k_seqinfo, seqlen=contexts),
        block_tables=call.block_table[requests, :pages] * factor,
    )


@cache
def _mask_on_host(entries: int, size: int, pages: int, page_size: int) -> Any:
    """xformers' mask of so many requests, the largest of `size` rows; its tensors are replaced."""
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

    return PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [size] * entries,
        [pages * page_size] * entries,
        torch.zeros(1, dtype=torch.int32).expand(entries, pages),
        page_size,
        device=torch.device("cpu"),
    )
