"""Workers, either model runner: the worker on a CPU, attention backends."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import Seam

_BACKENDS = "vllm.v1.attention.backends"
_CPU = f"{_BACKENDS}.cpu_attn"
_LATENT = "vllm.model_executor.layers.attention.mla_attention"
_CUDA = (("flash_attn", "FlashAttention"), ("triton_attn", "TritonAttention"))
_MASK = "attention metadata carries a mask for each request"

SEAMS = (
    Seam(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker",
        ("init_device", "compile_or_warm_up_model", "model_runner"),
        "overridden",
        "makes our runner, measures the cost of a step",
        "the runner class can be configured",
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
                f"{name}Impl.forward",
                ("query", "kv_cache", "attn_metadata", "output"),
                "overridden",
                "afterwards overwrites the rows of branching trees",
                _MASK,
            ),
        )
    ),
)
