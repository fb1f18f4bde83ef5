"""Workers, second model runner: steps that vLLM prepares before their drafts are known."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

_GPU = "vllm.v1.worker.gpu"
_SHARES = (
    "vLLM takes the number of rows of each request from the device, as adaptive verification does"
)
_PREPARED = "vLLM prepares a step before the tokens of the step before have arrived"

SEAMS = (
    # The model call, where the drafts are placed.
    Seam(
        f"{_GPU}.cudagraph_utils",
        "ModelCudaGraphManager.run_fullgraph",
        ("desc",),
        "overridden",
        "the drafts are placed before a graph is replayed, and choose the graph",
        _PREPARED,
    ),
    Seam(
        f"{_GPU}.model_runner",
        "GPUModelRunner",
        ("model", "input_buffers", "uses_inputs_embeds", "dp_size", "execute_model_state"),
        "set",
        "`forward` of the model, for steps outside of graphs; the buffers of a step",
        _PREPARED,
    ),
    Seam(
        f"{_GPU}.model_runner",
        "ExecuteModelState",
        ("input_batch",),
        "set",
        "gets the batch with exact shapes before it is sampled",
        _PREPARED,
    ),
    # What a step depends on apart from its shape: all of it is rewritten.
    Seam(
        f"{_GPU}.input_batch",
        "InputBuffers",
        ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens"),
        "set",
        "the rows of a step",
        _SHARES,
    ),
    Seam(
        f"{_GPU}.block_table",
        "BlockTables",
        ("slot_mappings", "block_tables", "block_sizes", "slot_mapping_enabled"),
        "set",
        "the KV slots of the rows",
        _SHARES,
    ),
    Seam(
        f"{_GPU}.states",
        "RequestState",
        ("num_computed_tokens", "last_sampled_tokens", "num_computed_prefill_tokens"),
        "read",
        "lengths and last tokens on the device; which requests read a prompt",
        _SHARES,
    ),
    Seam(
        f"{_GPU}.input_batch",
        "InputBatch",
        (
            *("num_reqs_after_padding", "num_tokens", "num_tokens_after_padding"),
            *("num_scheduled_tokens", "num_draft_tokens", "num_draft_tokens_per_req"),
            *("query_start_loc", "query_start_loc_np", "seq_lens", "seq_lens_cpu_upper_bound"),
            *("num_computed_tokens_np", "input_ids", "positions", "is_padding", "logits_indices"),
            *("cu_num_logits", "cu_num_logits_np", "expanded_idx_mapping", "expanded_local_pos"),
            "max_query_len",
        ),
        "set",
        "exact shapes, after the launch",
        _SHARES,
    ),
    Seam(
        f"{_GPU}.input_batch",
        "expand_idx_mapping",
        ("idx_mapping", "total_num_logits", "cu_num_logits", "max_expand_len"),
        "called",
        "the rows of logits of a batch with exact shapes",
        _SHARES,
    ),
    # Metadata that attention's builders make on the host.
    Seam(
        f"{_GPU}.model_states.interface",
        "ModelState.prepare_attn",
        (
            *("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
            "kv_cache_config",
        ),
        "called",
        "made again for the exact rows, where a forward pass reads more than buffers",
        _SHARES,
    ),
    Seam(
        f"{_GPU}.model_states.default",
        "DefaultModelState",
        (),
        "read",
        "the only state of a model whose inputs are tokens and positions",
        _SHARES,
    ),
    Seam(
        f"{_GPU}.attn_utils",
        "build_slot_mappings_by_layer",
        ("slot_mappings", "kv_cache_config"),
        "called",
        "the KV slots of a forward pass outside of graphs",
        _SHARES,
    ),
    Seam(
        "vllm.forward_context",
        "get_forward_context",
        (),
        "called",
        "metadata of a forward pass outside of graphs",
        _PREPARED,
    ),
    Seam(
        "vllm.forward_context",
        "ForwardContext",
        ("attn_metadata", "slot_mapping", "is_padding"),
        "set",
        "metadata of a forward pass outside of graphs, made when the first layer asks for it",
        _PREPARED,
    ),
    Seam(
        "vllm.model_executor.layers.attention.attention",
        "get_attention_context",
        ("layer_name",),
        "read",
        "a layer asks for its metadata before it reads its KV slots",
        _PREPARED,
    ),
    Seam(
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionMetadataBuilder",
        ("aot_schedule",),
        "read",
        "whether a captured graph reads a schedule that the builder makes of the lengths",
        _SHARES,
    ),
    Seam(
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionMetadataBuilder.update_draft_decode_metadata",
        ("metadata",),
        "called",
        "makes that schedule again on the device, for a graph that is chosen late",
        _SHARES,
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionMetadataBuilder.update_draft_decode_metadata",
        (),
        "called",
        "the same; it has nothing to make",
        _SHARES,
    ),
    # Where steps are prepared early.
    Seam(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            *("scheduled_new_reqs", "scheduled_spec_decode_tokens", "num_scheduled_tokens"),
            *("total_num_scheduled_tokens", "has_structured_output_requests"),
        ),
        "read",
        "whether a step only decodes, without grammars",
        _PREPARED,
    ),
    Seam(
        "vllm.config.parallel",
        "ParallelConfig",
        (
            *("pipeline_parallel_size", "decode_context_parallel_size", "enable_eplb"),
            *("prefill_context_parallel_size", "use_ubatching"),
        ),
        "read",
        "whether a step is one batch on one stage",
        PUBLIC,
    ),
    Seam(
        "vllm.v1.worker.gpu.buffer_utils",
        "UvaBuffer",
        ("np", "uva"),
        "called",
        "memory of the host that the device reads: the rows of a step",
        PUBLIC,
    ),
    Seam(
        "vllm.v1.worker.gpu.buffer_utils",
        "NonUvaBuffer",
        ("np", "uva"),
        "called",
        "the same, where there is no such memory",
        PUBLIC,
    ),
    Seam(
        "vllm.utils.platform_utils",
        "is_uva_available",
        (),
        "called",
        "the same",
        PUBLIC,
    ),
    Seam(
        "vllm.config.vllm",
        "VllmConfig",
        ("kv_transfer_config", "ec_transfer_config", "aux_output_config", "cache_config"),
        "read",
        "whether something else reads the inputs of a step",
        PUBLIC,
    ),
    Seam(
        "vllm.config.cache",
        "CacheConfig",
        ("kv_sharing_fast_prefill",),
        "read",
        "the same",
        PUBLIC,
    ),
    Seam(
        "vllm.config.compilation",
        "CompilationConfig",
        ("mode",),
        "read",
        "whether steps outside of graphs are compiled",
        PUBLIC,
    ),
    Seam(
        "vllm.config.compilation",
        "CompilationMode",
        ("NONE",),
        "read",
        "the same",
        PUBLIC,
    ),
)
