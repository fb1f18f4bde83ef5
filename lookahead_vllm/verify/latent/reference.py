"""Latent attention in plain PyTorch: the reference for the kernel, and the fallback without one."""

from dataclasses import replace

from lookahead_vllm.verify.attention import PagedCall
from lookahead_vllm.verify.attention.reference import reference_paged_attention
from lookahead_vllm.verify.latent import LatentCall


def attend(call: LatentCall) -> None:
    """In float32, as attention with one KV head. Synchronises with the device."""
    keys = call.cache[:, :, None]
    by_rows = PagedCall(
        call.query,
        keys,
        keys[..., : call.output.shape[2]],
        call.output,
        call.block_table,
        replace(call.batch, starts=call.batch.firsts),
        call.scale,
        k_scale=call.cache_scale,
        v_scale=call.cache_scale,
    )
    for first, rows in reference_paged_attention(by_rows):
        call.output[first : first + len(rows)] = rows.to(call.output.dtype)
