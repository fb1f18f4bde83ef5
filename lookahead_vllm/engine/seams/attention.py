"""Workers, either model runner: attention backends."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

_BACKENDS = "vllm.v1.attention.backends"
_CPU = f"{_BACKENDS}.cpu_attn"
_LATENT = "vllm.model_executor.layers.attention.mla_attention"
_CUDA = (("flash_attn", "FlashAttention"), ("triton_attn", "TritonAttention"))
_MASK = "attention metadata carries a mask for each request"
_CHOSEN = "a plugin can choose the attention backend of each layer"

SEAMS = (
    # Any device.
    Seam(
        f"{_BACKENDS}.registry",
        "register_backend",
        ("backend", "class_path"),
        "called",
        "puts our backends in place of CPU_ATTN, FLASH_ATTN and TRITON_ATTN, in workers that "
        "serve lookahead",
        _CHOSEN,
    ),
    Seam(
        f"{_BACKENDS}.registry",
        "AttentionBackendEnum",
        ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"),
        "read",
        "the backends that register_backend replaces",
        _CHOSEN,
    ),
    Seam(
        "vllm.v1.attention.selector",
        "_cached_get_attn_backend",
        ("attn_selector_config",),
        "called",
        "cache_clear: a plain engine in the same process may have filled the cache",
        _CHOSEN,
    ),
    Seam("vllm.v1.attention.backend", "AttentionType", ("DECODER",), "read", "its type", PUBLIC),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionLayer",
        ("_q_scale", "_k_scale", "_v_scale"),
        "read",
        "the scales of fp8",
        _MASK,
    ),
    Seam(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        ("num_reqs", "seq_lens", "seq_lens_cpu_upper_bound", "block_table_tensor"),
        "read",
        "the rows of the batch",
        _MASK,
    ),
    Seam(
        "vllm.model_executor.layers.attention.attention",
        "Attention",
        ("impl", "kv_cache"),
        "read",
        "a layer's implementation, and its part of the KV cache",
        _MASK,
    ),
    # Latent attention on CUDA.
    Seam(
        f"{_BACKENDS}.mla.triton_mla",
        "TritonMLAMetadataBuilder",
        ("query_len_support",),
        "set",
        "one row a request: its workspace would have rows for the longest drafts of all requests",
        _MASK,
    ),
    Seam(
        _LATENT,
        "QueryLenSupport",
        ("SINGLE_ONLY",),
        "read",
        "whether requests with drafts can share a step with others",
        _MASK,
    ),
    # Any device, latent attention.
    Seam(
        _LATENT,
        "MLACommonMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "wrapped",
        "lays out the trees; vLLM's kernels get no context for them",
        _MASK,
    ),
    Seam(
        _LATENT,
        "MLAAttention.forward_impl",
        ("q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output"),
        "wrapped",
        "afterwards overwrites the rows of branching trees",
        _MASK,
    ),
    Seam(
        _LATENT,
        "MLAAttention",
        (
            *("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"),
            *("kv_lora_rank", "scale", "kv_cache", "kv_cache_dtype", "use_sparse"),
            *("sliding_window", "_v_up_proj", "process_weights_after_loading"),
        ),
        "called",
        "projects queries to the latents and results from them; W_UK_T is made where weights are "
        "processed",
        _MASK,
    ),
    Seam(
        f"{_BACKENDS}.mla.cpu_mla",
        "CPUMLAImpl.forward_mqa",
        ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
        "called",
        "on a CPU, computes each row of a draft as a decode row of its own",
        _MASK,
    ),
    Seam(
        "vllm.config.compilation",
        "PassConfig",
        ("fuse_attn_quant",),
        "read",
        "quantized outputs cannot be overwritten",
        _MASK,
    ),
    # CPU.
    Seam(
        _CPU,
        "CPUAttentionBackendImpl.forward",
        ("query", "kv_cache", "attn_metadata", "output"),
        "overridden",
        "rows of a branching tree get tree attention, all others the native kernel",
        "the native kernel takes a mask",
    ),
    Seam(
        _CPU,
        "CPUAttentionMetadataBuilder",
        ("build", "isa", "_set_isa_to_layers"),
        "overridden",
        "carries the trees; isa is the layout of its layers' KV cache",
        "the native kernel takes a mask",
    ),
    Seam(
        _CPU,
        "CPUAttentionMetadataBuilder",
        ("head_dim", "dtype"),
        "read",
        "shape and dtype of its layers",
        _MASK,
    ),
    Seam(_CPU, "CPUAttentionMetadata", ("seq_lens",), "read", "the length of each context", _MASK),
    # CUDA.
    *(
        seam
        for module, name in _CUDA
        for seam in (
            Seam(
                f"{_BACKENDS}.{module}",
                f"{name}Backend",
                ("get_impl_cls", "get_builder_cls"),
                "overridden",
                "returns our subclasses of the implementation and the metadata builder",
                _MASK,
            ),
            Seam(
                f"{_BACKENDS}.{module}",
                f"{name}MetadataBuilder.build",
                ("common_prefix_len", "common_attn_metadata", "fast_build"),
                "overridden",
                "lays out the trees; vLLM's kernel gets no context for them",
                _MASK,
            ),
            Seam(
                f"{_BACKENDS}.{module}",
                f"{name}MetadataBuilder",
                ("headdim",),
                "read",
                "the head size of its layers",
                _MASK,
            ),
            Seam(
                f"{_BACKENDS}.{module}",
                f"{name}Metadata",
                ("seq_lens",),
                "set",
                "the length of each context that vLLM's kernel reads",
                _MASK,
            ),
            Seam(
                f"{_BACKENDS}.{module}",
                f"{name}Impl.forward",
                ("query", "kv_cache", "attn_metadata", "output"),
                "overridden",
                "afterwards overwrites the rows of branching trees",
                _MASK,
            ),
            Seam(
                f"{_BACKENDS}.{module}",
                f"{name}Impl",
                (
                    *("head_size", "scale", "sliding_window", "alibi_slopes"),
                    *("logits_soft_cap", "sinks", "attn_type", "kv_cache_dtype"),
                    *("num_heads", "num_kv_heads"),
                ),
                "read",
                "the parameters of a layer's attention",
                _MASK,
            ),
        )
    ),
    Seam(
        f"{_BACKENDS}.triton_attn",
        "TritonAttentionImpl",
        ("use_alibi_sqrt", "chunk_lookback"),
        "read",
        "layers that have them get chains",
        _MASK,
    ),
)
