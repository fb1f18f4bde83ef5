"""Every process: the engine's configuration, the environment, the log."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

SEAMS = (
    # The only two functions that are wrapped in processes where nobody asks for lookahead.
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        ("parser",),
        "wrapped",
        "adds --speculative-model and --num-speculative-tokens, aliases of --spec-*",
        "vLLM lets plugins register flags",
    ),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("self",),
        "wrapped",
        "turns method 'lookahead' into one that vLLM knows, and chooses our worker and scheduler",
        "SpeculativeConfig.method is open to plugins",
    ),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs",
        (
            *("speculative_config", "spec_method", "spec_model", "spec_tokens"),
            *("async_scheduling", "enable_prefix_caching", "mamba_cache_mode"),
        ),
        "set",
        "the options in which a user can ask for lookahead; changed while vLLM makes its config. "
        "Recurrent states are not cached",
        "SpeculativeConfig.method is open to plugins",
    ),
    Seam(
        "vllm.config.vllm",
        "VllmConfig",
        (
            *("model_config", "cache_config", "parallel_config", "scheduler_config"),
            *("speculative_config", "kv_transfer_config", "additional_config", "compute_hash"),
            *("compilation_config", "use_v2_model_runner", "watermark_config"),
        ),
        "set",
        "describes the engine; our options are stored in additional_config",
        PUBLIC,
    ),
    Seam(
        "vllm.config.model",
        "ModelConfig",
        (
            *("model", "hf_text_config", "runner_type", "is_hybrid", "is_attention_free"),
            *("is_encoder_decoder", "is_mm_prefix_lm", "rswa_window", "logits_processors"),
            *("served_model_name", "seed", "max_model_len", "uses_mrope"),
            *("return_sampling_mask", "enable_trace_replay"),
        ),
        "read",
        "decides whether lookahead serves the model, and whether it does with trees",
        PUBLIC,
    ),
    Seam(
        "vllm.config.model",
        "ModelConfig",
        ("get_hidden_size", "get_total_num_hidden_layers", "get_vocab_size"),
        "called",
        "the number of parameters, by which the paper chooses a window",
        PUBLIC,
    ),
    Seam(
        "vllm.config.parallel",
        "ParallelConfig",
        ("pipeline_parallel_size", "data_parallel_index", "worker_cls"),
        "set",
        "refuses pipeline parallelism; worker_cls becomes our worker",
        PUBLIC,
    ),
    Seam(
        "vllm.config.parallel",
        "ParallelConfig",
        (
            *("rank", "world_size", "distributed_executor_backend"),
            *("decode_context_parallel_size", "prefill_context_parallel_size", "use_ubatching"),
            "enable_batch_sharded_sampling",
        ),
        "read",
        "the worker's rank in its engine, and whether a step is one batch of all ranks",
        PUBLIC,
    ),
    Seam(
        "vllm.config.scheduler",
        "SchedulerConfig",
        ("scheduler_cls", "max_num_seqs", "max_num_batched_tokens", "async_scheduling"),
        "set",
        "bounds of a step; scheduler_cls becomes our scheduler",
        PUBLIC,
    ),
    Seam(
        "vllm.config.speculative",
        "SpeculativeConfig",
        ("model",),
        "set",
        "whether the engine drafts with lookahead",
        PUBLIC,
    ),
    Seam(
        "vllm.config.cache",
        "CacheConfig",
        ("cache_dtype", "mamba_cache_mode", "use_replayssm"),
        "read",
        "dtype of the KV cache, slots of recurrent states",
        PUBLIC,
    ),
    Seam(
        "vllm.config.compilation",
        "CompilationConfig",
        ("static_forward_context", "cudagraph_mode"),
        "read",
        "the attention layers; which steps run as CUDA graphs",
        "the runner offers its layers",
    ),
    Seam(
        "vllm.config.compilation",
        "CUDAGraphMode",
        ("FULL", "has_full_cudagraphs"),
        "read",
        "which steps run as CUDA graphs",
        PUBLIC,
    ),
    Seam(
        "vllm.config.vllm",
        "",
        ("HAS_TRITON",),
        "read",
        "whether plain vLLM may choose its second model runner",
        "SpeculativeConfig.method is open to plugins",
    ),
    Seam(
        "vllm.envs",
        "",
        ("VLLM_USE_RUST_FRONTEND", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CACHE_ROOT"),
        "read",
        "the first is refused, the second chooses the runner; measured costs are stored below "
        "the third",
        PUBLIC,
    ),
    Seam(
        "vllm",
        "",
        ("__version__", "__version_tuple__"),
        "read",
        "measured costs belong to one version; 0.33 takes equally many masks of every request of "
        "a step, 0.32 does not (EQUALLY_MANY_MASKS)",
        "0.32 is no longer supported",
    ),
    Seam(
        "vllm.platforms.interface",
        "Platform",
        ("fp8_dtype", "get_device_name", "is_cpu"),
        "read",
        "the device",
        PUBLIC,
    ),
    Seam(
        "vllm.logger",
        "_VllmLogger",
        ("info_once", "warning_once", "error_once"),
        "called",
        "messages in vLLM's log",
        PUBLIC,
    ),
)
