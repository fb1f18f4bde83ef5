"""vLLM's kernels of recurrent layers, replaced in steps whose metadata has the rows' parents.

vLLM's own kernels know chains only, and on a CPU they are wrong for rows with drafts: convolutions
ignore the number of accepted tokens, and the gated delta net's kernel for drafts rounds unlike its
kernel for one token. The places where the layers call them are patched; all rows that vLLM treats
as decodes go to `verify/recurrence.py`, and prompts stay vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.worker.recurrent import PARENTS
from lookahead_vllm.verify import recurrence
from lookahead_vllm.verify.cpu.recurrence import path_windows
from lookahead_vllm.verify.recurrence import Trees


@functools.cache
def register() -> None:
    """Patch the places, in a process that serves a model with recurrent layers."""
    patches.patch(mamba_mixer2, "causal_conv1d_update", _convolution)
    patches.patch(mamba_mixer2, "selective_state_update", _mamba2)
    patches.patch(causal_conv1d, "causal_conv1d_update_cpu", _convolution)
    patches.patch(gdn_attention, "_spec_forward", _gated_delta)
    patches.patch(gdn_attention, "_cpu_gdn_attention_spec_aware", _with_plain_convolution)


def _trees(state_indices: torch.Tensor) -> Trees | None:
    """The drafted rows of the step for Mamba 2 and short convolutions; None: not ours.

    Parameters
    ----------
    state_indices : int32 [requests, columns], or flat
        The layer's state slots.
    """
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return None
    for one in metadata.values():
        # All recurrent layers have the same rows.
        if isinstance(one, BaseMambaAttentionMetadata) and hasattr(one, PARENTS):
            starts = one.query_start_loc_d
            assert starts is not None and one.num_accepted_tokens is not None
            columns = state_indices.view(len(starts) - 1, -1)
            return Trees(starts, getattr(one, PARENTS), columns, one.num_accepted_tokens)
    return None


def _convolution(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap the update of a convolution's window."""

    @functools.wraps(original)
    def update(
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Any = None,
        conv_state_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        trees = _trees(conv_state_indices) if conv_state_indices is not None else None
        if trees is None:
            kwargs["conv_state_indices"] = conv_state_indices
            return original(x, conv_state, weight, bias, activation, **kwargs)
        return recurrence.convolution(x, conv_state, weight, bias, activation, trees)

    return update


def _mamba2(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the update of Mamba 2's state."""

    @functools.wraps(original)
    def update(
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        trees = _trees(kwargs["state_batch_indices"])
        if trees is None:
            original(state, x, dt, A, B, C, D, dt_bias, **kwargs)
            return
        recurrence.mamba2(
            *(state, x, dt, A, B, C, D, dt_bias, trees),
            kwargs["out"],
            z=kwargs.get("z"),
            dt_softplus=kwargs.get("dt_softplus", False),
        )

    return update


def _gated_delta(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a CPU's gated delta net over rows with drafts."""

    @functools.wraps(original)
    def forward(
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv_spec: torch.Tensor,
        b_spec: torch.Tensor,
        a_spec: torch.Tensor,
        conv_buf: torch.Tensor,
        ssm_state: torch.Tensor,
        *args: Any,
    ) -> torch.Tensor:
        metadata = attn_metadata_i
        if not hasattr(metadata, PARENTS):
            return original(
                *(layer, metadata, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, *args)
            )
        trees = Trees(
            metadata.spec_query_start_loc,
            getattr(metadata, PARENTS)[metadata.spec_token_indx.long()],
            metadata.spec_state_indices_tensor,
            metadata.num_accepted_tokens,
        )
        mixed = _packed_convolution(layer, mixed_qkv_spec, conv_buf, trees)
        q, k, v = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(mixed))
        out = torch.empty_like(v)
        recurrence.gated_delta(
            ssm_state, q, k, v, a_spec, b_spec, layer.A_log, layer.dt_bias, trees, out
        )
        return out

    return forward


def _with_plain_convolution(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a CPU's gated delta net with room for drafts: prompts are rounded as without it.

    Without room for drafts, vLLM takes the same compiled convolution wherever the processor has
    AVX-512 with bfloat16, with AMX or not.
    """

    @functools.wraps(original)
    def forward(layer: Any, attn_metadata_i: Any, *args: Any) -> None:
        if not hasattr(attn_metadata_i, PARENTS):
            original(layer, attn_metadata_i, *args)
            return
        has_kernel = torch.cpu._is_avx512_bf16_supported
        with patches.swapped(torch.cpu, "_is_amx_tile_supported", has_kernel):
            original(layer, attn_metadata_i, *args)

    return forward


def _packed_convolution(
    layer: Any, x: torch.Tensor, window: torch.Tensor, trees: Trees
) -> torch.Tensor:
    """The convolution of a gated delta net's rows, rounded as in plain decode."""
    weight, bias = gdn_attention._unpacked_conv_weight(layer), layer.conv1d.bias
    if weight.data_ptr() == layer.conv1d.weight.data_ptr():  # vLLM has not packed it
        return recurrence.convolution(x, window, weight, bias, layer.activation, trees)
    return gdn_attention._causal_conv1d_update_cpu(
        x=x,
        conv_states=path_windows(x, window, weight.shape[1], trees),
        weight=layer.conv1d.weight,
        bias=bias,
        silu_activation=layer.activation == "silu",
        conv_state_indices=torch.arange(len(x), dtype=torch.int32),
        is_weight_packed=True,
    )
