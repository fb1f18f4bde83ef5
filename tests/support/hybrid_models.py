"""Tiny random models with attention and recurrent layers, in float32; see `models.py`."""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from tests.support.models import COMMON, DIVIDED, EXPERTS, ROTARY, WANDERING

STATE = dict(mamba_n_heads=4, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4)
ROPE = dict(rope_type="default", rope_theta=10000.0)
SHORT: dict[str, Any] = dict(COMMON, hidden_size=64, max_position_embeddings=512)

HYBRIDS: dict[str, dict[str, Any]] = {
    "falcon_h1": dict(
        ROTARY,
        **STATE,
        architecture="FalconH1ForCausalLM",
        mamba_d_ssm=128,
        mamba_d_head=32,
        mamba_expand=2,
        mamba_chunk_size=16,
        mlp_multipliers=[1.0, 1.0],
        ssm_multipliers=[1.0] * 5,
    ),
    "nemotron_h": dict(
        SHORT,
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        num_hidden_layers=4,
        hybrid_override_pattern="M*M-",
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        ssm_state_size=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=1,
        conv_kernel=4,
        chunk_size=16,
        sliding_window=40,
    ),
    "granite4": dict(
        DIVIDED,
        **STATE,
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        num_hidden_layers=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        layer_types=["mamba", "attention"] * 2,
        position_embedding_type="rope",
        rope_parameters=ROPE,
        mamba_d_head=64,
        mamba_expand=2,
        mamba_chunk_size=16,
        attention_multiplier=0.25,
    ),
    "zamba2": dict(
        SHORT,
        architecture="Zamba2ForCausalLM",
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid"] * 2,
        hybrid_layer_ids=[1, 3],
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_head_dim=32,
        attention_hidden_size=128,
        n_mamba_heads=4,
        mamba_headdim=32,
        mamba_d_state=16,
        mamba_ngroups=1,
        mamba_expand=2,
        mamba_d_conv=4,
        chunk_size=16,
        num_mem_blocks=1,
        use_mem_rope=True,
    ),
    "lfm2": dict(
        SHORT,
        architecture="Lfm2ForCausalLM",
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        conv_bias=False,
        conv_dim=128,
        conv_dim_out=128,
        block_dim=128,
        block_ff_dim=128,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        intermediate_size=128,
        norm_eps=1e-6,
        # Without scaling, vLLM 0.32's rotation on CPU reads past the stride of a key.
        rope_parameters=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=128, rope_theta=10000.0
        ),
    ),
    "qwen3_next": dict(
        ROTARY,
        **EXPERTS,
        architecture="Qwen3NextForCausalLM",
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        shared_expert_intermediate_size=32,
    ),
}
"""By the names that `save_config` takes."""

ENGINE_SETTINGS: dict[str, dict[str, Any]] = {
    # vLLM 0.32 has the short convolution on a CPU in PyTorch only.
    "lfm2": dict(compilation_config=dict(custom_ops=["none"])),
}
"""What an engine of a model needs beside the settings of every test."""

CACHING: dict[str, Any] = dict(
    enable_prefix_caching=True,
    prefix_cache_retention_interval=None,  # states behind prompts are kept, too
    block_size=32,
    max_model_len=512,
    max_num_batched_tokens=64,  # prompts in chunks
)
"""Settings of an engine whose prompts take several chunks and end in many blocks."""


def settings_of(name: str) -> dict[str, Any]:
    """What an engine of a model needs in float32."""
    # Its state is so large that nodes need larger blocks.
    size = {"block_size": 192} if name.startswith("qwen3_next") else {}
    return dict(load_format=WANDERING, **size, **ENGINE_SETTINGS.get(name, {}))


_bfloat16_gated_delta = gdn_attention.cpu_gdn_attention_core


def float32_gated_delta(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """vLLM's `cpu_gdn_attention_core`, which has bfloat16 only, in float32.

    Rows with drafts are vLLM's, or whatever replaces them; all others follow the recurrence of
    Gated Delta Networks (ICLR 2025), section 3, token by token.
    """
    context = get_forward_context()
    if mixed_qkv.dtype == torch.bfloat16:
        return _bfloat16_gated_delta(mixed_qkv, b, a, core_attn_out, layer_name)
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata: Any = context.attn_metadata[layer.prefix]
    windows, states = gdn_attention._conv_buffer_view(layer), gdn_attention._ssm_state_view(layer)
    weight = gdn_attention._unpacked_conv_weight(layer)
    width = weight.shape[1]
    tokens = torch.arange(metadata.num_actual_tokens)
    if metadata.spec_sequence_masks is not None:
        drafted = metadata.spec_token_indx.long()
        inputs = (part[drafted].contiguous() for part in (mixed_qkv, b, a))
        core_attn_out[drafted] = gdn_attention._spec_forward(
            layer, metadata, *inputs, windows, states, width, windows.shape[2]
        )
        tokens = metadata.non_spec_token_indx.long()
    if metadata.non_spec_state_indices_tensor is None:
        return
    starts = metadata.non_spec_query_start_loc.tolist()
    decay = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    for i, slot in enumerate(metadata.non_spec_state_indices_tensor.tolist()):
        own = tokens[starts[i] : starts[i + 1]]
        if not len(own):
            continue
        window, state = windows[slot], states[slot]
        if metadata.has_initial_state is not None and not metadata.has_initial_state[i]:
            window[:, : width - 1], state[:] = 0, 0
        inputs = torch.cat([window[:, : width - 1], mixed_qkv[own].T], dim=1)
        window[:, : width - 1] = inputs[:, -(width - 1) :]
        # One addition after the other, whatever the number of tokens.
        mixed = sum(inputs[:, j : j + len(own)] * weight[:, j, None] for j in range(width))
        q, k, v = (part[0] for part in layer.rearrange_mixed_qkv(F.silu(mixed).T.contiguous()))
        q, k = (
            (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
                v.shape[1] // part.shape[1], dim=1
            )
            for part in (q, k)
        )
        for t, token in enumerate(own):
            state *= decay[token].exp()[:, None, None]
            error = (v[t] - (state * k[t, :, :, None]).sum(1)) * b[token].sigmoid()[:, None]
            state += k[t, :, :, None] * error[:, None]
            core_attn_out[token] = (state * q[t, :, :, None]).sum(1) * q.shape[-1] ** -0.5


def use_float32_gated_delta() -> None:
    """Replace vLLM's operator, before the first engine with such a layer registers it."""
    gdn_attention.cpu_gdn_attention_core = float32_gated_delta
