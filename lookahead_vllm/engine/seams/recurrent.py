"""Workers: recurrent layers, which keep states instead of keys and values."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import Seam

_LAYERS = "vllm.model_executor.layers.mamba"
_NODES = "recurrent layers compute the nodes of a tree"
_PAGES = "models with short convolutions count drafts"
_CHAINS = "drafts of recurrent layers are right on a CPU"

ON_GPU = (
    Seam(
        f"{_LAYERS}.short_conv",
        "",
        ("causal_conv1d_update",),
        "wrapped",
        "in a step with branching trees, each row starts from its parent's window",
        _NODES,
    ),
    Seam(
        f"{_LAYERS}.gdn.qwen_gdn_linear_attn",
        "",
        ("causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update"),
        "wrapped",
        "in a step with branching trees, each row starts from its parent's window and state",
        _NODES,
    ),
    Seam(
        f"{_LAYERS}.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode",
        ("attn_metadata",),
        "wrapped",
        "false in a step with branching trees: the fused kernel computes only chains",
        _NODES,
    ),
)
"""Those of worker/recurrent_kernels_gpu.py."""

SEAMS = (
    *ON_GPU,
    # The kernels (worker/recurrent_kernels.py, worker/recurrent_kernels_cpu.py).
    Seam(
        f"{_LAYERS}.mamba_mixer2",
        "",
        ("causal_conv1d_update", "selective_state_update"),
        "wrapped",
        "in a step with lookahead's rows, each row starts from its parent's state",
        _NODES,
    ),
    Seam(
        f"{_LAYERS}.ops.cpu.causal_conv1d",
        "causal_conv1d_update_cpu",
        ("x", "conv_state", "weight", "bias", "activation", "conv_state_indices"),
        "wrapped",
        "the same for short convolutions, which pass neither accepted tokens nor the rows of a "
        "request",
        _CHAINS,
    ),
    Seam(
        f"{_LAYERS}.ops.cpu.gdn_attention",
        "_spec_forward",
        (
            *("layer", "attn_metadata_i", "mixed_qkv_spec", "b_spec", "a_spec", "conv_buf"),
            "ssm_state",
        ),
        "wrapped",
        "the same for gated delta nets; vLLM's kernels for drafts and for one token round unalike",
        _CHAINS,
    ),
    Seam(
        f"{_LAYERS}.ops.cpu.gdn_attention",
        "_cpu_gdn_attention_spec_aware",
        ("layer", "attn_metadata_i"),
        "wrapped",
        "prompts take the convolution that they take without drafts",
        "vLLM requires only AVX-512 with bfloat16 in both cases",
    ),
    # Metadata and states (worker/recurrent.py).
    Seam(
        "vllm.platforms.interface",
        "Platform._align_hybrid_block_size",
        ("vllm_config",),
        "wrapped",
        "counts the nodes in the windows of short convolutions, see below",
        _PAGES,
    ),
    Seam(
        f"{_LAYERS}.mamba_utils",
        "MambaStateShapeCalculator.short_conv_state_shape",
        ("num_spec",),
        "swapped",
        "while vLLM chooses the size of a block, because models leave num_spec out",
        _PAGES,
    ),
    Seam(
        "vllm.v1.attention.backends.mamba_attn",
        "BaseMambaAttentionMetadataBuilder.build_for_cudagraph_capture",
        ("common_attn_metadata",),
        "wrapped",
        "also captures steps in which every request has one token, as plain vLLM does",
        "under speculation, vLLM captures only steps of the longest drafts",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid",
        "MambaHybridModelState.prepare_attn",
        ("input_batch",),
        "overridden",
        "on the runner's instance: adds the parents of the rows (worker/v2/runner.py)",
        _NODES,
    ),
    # The first model runner (worker/v1/recurrent.py).
    Seam(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._may_reorder_batch",
        ("scheduler_output",),
        "overridden",
        "known tokens after the prompt count as a prompt",
        "vLLM does not take short chunks for drafts",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.calculate_reorder_batch_threshold",
        (),
        "overridden",
        "drafts come before prompts, whatever threshold other layers need",
        "each layer splits the batch by its own threshold",
    ),
)
