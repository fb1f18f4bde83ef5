"""vLLM's kernels of recurrent layers on a CPU, replaced as in `kernels.py`.

vLLM's kernels are wrong for rows with drafts: convolutions ignore the number of accepted tokens,
and the gated delta net's kernel for drafts rounds differently from its kernel for one token. So
they are replaced for chains, too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.recurrent import kernels as recurrent_kernels
from lookahead_vllm.engine.recurrent.kernels import convolution, delta_trees, trees_of_slots
from lookahead_vllm.engine.recurrent.states import PARENTS
from lookahead_vllm.verify import recurrence
from lookahead_vllm.verify.recurrence import GatedDelta, StateRows
from lookahead_vllm.verify.recurrence.cpu import path_windows


@functools.cache
def register() -> None:
    """Patch vLLM, in a process that serves a model with recurrent layers."""
    recurrent_kernels.register()
    patches.patch(causal_conv1d, "causal_conv1d_update_cpu", convolution(trees_of_slots))
    patches.patch(gdn_attention, "_spec_forward", _gated_delta)
    patches.patch(gdn_attention, "_cpu_gdn_attention_spec_aware", _with_plain_convolution)


def _gated_delta(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a CPU's gated delta net over rows with drafts."""

    @functools.wraps(original)
    def forward(layer: Any, attn_metadata_i: Any, *args: torch.Tensor) -> torch.Tensor:
        if not hasattr(attn_metadata_i, PARENTS):
            return original(layer, attn_metadata_i, *args)
        mixed_qkv, b, a, window, state, *_ = args
        trees = delta_trees(attn_metadata_i, attn_metadata_i.spec_state_indices_tensor)
        mixed = _packed_convolution(layer, mixed_qkv, window, trees)
        q, k, v = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(mixed))
        out = torch.empty_like(v)
        inputs = GatedDelta(q, k, v, a, b, layer.A_log, layer.dt_bias)
        recurrence.gated_delta(state, inputs, trees, out)
        return out

    return forward


def _with_plain_convolution(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a CPU's gated delta net: prompts are rounded as in an engine without drafts.

    There, vLLM uses the compiled convolution if the processor has AVX-512 with bfloat16; with
    drafts, it would also require AMX.
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
    layer: Any, x: torch.Tensor, window: torch.Tensor, trees: StateRows
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
