"""Workers, first model runner: recurrent layers, which keep states instead of keys and values."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import Seam

_LAYERS = "vllm.model_executor.layers.mamba"
_BACKENDS = "vllm.v1.attention.backends"
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
    Seam(
        f"{_LAYERS}.ops.causal_conv1d",
        "causal_conv1d_update",
        (
            *("x", "conv_state", "weight", "bias", "activation", "conv_state_indices"),
            *("num_accepted_tokens", "query_start_loc"),
        ),
        "called",
        "its arguments are those of lookahead's kernel",
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
    Seam(
        f"{_LAYERS}.ops.cpu.gdn_attention",
        "_unpacked_conv_weight",
        ("layer",),
        "called",
        "the weights of the convolution, as they were before vLLM packed them",
        _CHAINS,
    ),
    Seam(
        f"{_LAYERS}.ops.cpu.gdn_attention",
        "_causal_conv1d_update_cpu",
        (
            *("x", "conv_states", "weight", "bias", "silu_activation", "conv_state_indices"),
            "is_weight_packed",
        ),
        "called",
        "rounds a row's convolution as in plain decode, with packed weights",
        _CHAINS,
    ),
    Seam(
        f"{_LAYERS}.ops.ssu_dispatch",
        "selective_state_update",
        (
            *("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z", "dt_softplus"),
            *("state_batch_indices", "out"),
        ),
        "called",
        "its arguments are those of lookahead's kernel",
        _NODES,
    ),
    Seam(
        f"{_LAYERS}.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention",
        ("rearrange_mixed_qkv", "conv1d", "A_log", "dt_bias"),
        "called",
        "splits the convolution's output; the layer's parameters",
        _CHAINS,
    ),
    Seam(
        "vllm.forward_context",
        "ForwardContext",
        ("attn_metadata",),
        "read",
        "the rows that a kernel computes",
        _NODES,
    ),
    # Metadata and states (worker/recurrent.py).
    Seam(
        f"{_BACKENDS}.mamba_attn",
        "BaseMambaAttentionMetadata",
        ("query_start_loc_d", "num_accepted_tokens"),
        "set",
        "an attribute of ours holds the parents of the rows",
        _NODES,
    ),
    Seam(
        f"{_BACKENDS}.gdn_attn",
        "GDNAttentionMetadata",
        (
            *("spec_query_start_loc", "spec_token_indx", "spec_state_indices_tensor"),
            "num_accepted_tokens",
        ),
        "set",
        "an attribute of ours holds the parents of the rows",
        _NODES,
    ),
    Seam(
        f"{_LAYERS}.abstract",
        "MambaBase",
        ("kv_cache",),
        "set",
        "the accepted leaf's state and inputs move to where vLLM reads them",
        _NODES,
    ),
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
    *(
        Seam(f"{_LAYERS}.{module}", name, needs, "read", "its window and activation", _NODES)
        for module, name, needs in (
            ("mamba_mixer2", "MambaMixer2", ("num_spec",)),
            ("short_conv", "ShortConv", ("num_spec",)),
            ("gdn.base", "GatedDeltaNetAttention", ("num_spec", "activation")),
        )
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
    Seam(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        ("reorder_batch_threshold", "num_spec_tokens", "query_pos"),
        "set",
        "the first, see above; the place of each token among its request's",
        _NODES,
    ),
    Seam(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        ("num_accepted_tokens_cpu", "num_prompt_tokens"),
        "set",
        "accepted tokens of a request that a step left out; its prompt, while a step is laid out",
        "vLLM keeps the accepted tokens of a request",
    ),
    Seam(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("preempted_req_ids", "scheduled_cached_reqs"),
        "read",
        "requests whose states are gone",
        "vLLM keeps the accepted tokens of a request",
    ),
    Seam(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("resumed_req_ids",),
        "read",
        "requests whose states are gone",
        "vLLM keeps the accepted tokens of a request",
    ),
)
