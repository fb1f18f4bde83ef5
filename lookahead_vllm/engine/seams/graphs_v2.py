"""Workers on CUDA, second model runner: the worker, graphs of steps with drafts."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_CLASS = "the runner class can be configured"
_MEASURED = "vLLM measures the cost of a step"
_GRAPH_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_GRAPHS = "vLLM captures graphs for steps with drafts of various lengths"

SEAMS = (
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker",
        ("compile_or_warm_up_model", "_make_model_runner", "model_runner"),
        "overridden",
        "makes our runner; compiles what a step with drafts needs, measures the cost of a step",
        _CLASS,
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "",
        ("register_top_k_top_p_warmups",),
        "swapped",
        "while the model is loaded: for speculative decoding, 0.33 would compile many kernels",
        "vLLM compiles fewer",
    ),
    Seam(
        _RUNNER,
        "",
        ("GPUModelRunner", "ModelCudaGraphManager"),
        "swapped",
        "our runner class while the worker makes its runner; a manager with graphs for drafts "
        "while the runner makes it",
        _GRAPHS,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache",
        ("kv_cache_config", "is_profiling"),
        "overridden",
        "meanwhile decode_query_len is 1, so that steps without drafts have plain vLLM's graphs; "
        "afterwards graphs for drafts are added",
        _GRAPHS,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._dummy_run",
        ("num_tokens", "uniform_decode"),
        "overridden",
        "meanwhile decode_query_len is 1: an idle rank's batch has one token, as in plain vLLM",
        _GRAPHS,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.prepare_inputs",
        ("batch_req_state", "batch_desc", "num_active_loras"),
        "overridden",
        "metadata of a step in a graph for drafts are built for the graph's bound",
        _GRAPHS,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner",
        (
            *("decode_query_len", "cudagraph_manager", "model_state", "pcp_manager", "dp_size"),
            *("dtype", "vocab_size"),
        ),
        "set",
        "which graphs there are; what the kernels are compiled for",
        _GRAPHS,
    ),
    Seam(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        ("max_query_len", "num_tokens_after_padding"),
        "set",
        "the graph that runs a step: only those for various lengths have a bound",
        _GRAPHS,
    ),
    Seam(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        (
            *("num_reqs", "num_reqs_after_padding", "num_tokens", "num_scheduled_tokens"),
            *("query_start_loc", "query_start_loc_np", "seq_lens", "seq_lens_cpu_upper_bound"),
            *("logits_indices", "positions"),
        ),
        "set",
        "the requests of a measured pass in a graph for drafts",
        _MEASURED,
    ),
    Seam(
        "vllm.v1.worker.gpu.input_batch",
        "set_dummy_context",
        (
            *("input_batch", "block_tables", "context_len", "num_kv_blocks", "max_model_len"),
            "input_block_tables",
        ),
        "called",
        "gives them a context",
        _MEASURED,
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionMetadataBuilder.build_for_cudagraph_capture",
        ("common_attn_metadata",),
        "overridden",
        "keeps the lengths of requests in a measured pass with trees",
        _MEASURED,
    ),
    Seam(
        _GRAPH_MODULE,
        "CudaGraphManager.capture",
        ("create_forward_fn",),
        "overridden",
        "announces each graph, so that the builders of metadata use its buffers",
        _GRAPHS,
    ),
    Seam(
        _GRAPH_MODULE,
        "CreateForwardFn.__call__",
        ("desc", "warmup"),
        "called",
        "prepares the inputs of a graph",
        _GRAPHS,
    ),
    Seam(
        _GRAPH_MODULE,
        "CudaGraphManager.dispatch",
        (
            *("num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"),
            *("max_query_len", "num_ubatches"),
        ),
        "overridden",
        "chooses a graph for a step with drafts, and never one without tree attention for trees",
        _GRAPHS,
    ),
    Seam(
        _GRAPH_MODULE,
        "CudaGraphManager",
        (
            *("cudagraph_mode", "compilation_config", "max_num_reqs", "lora_capture_cases"),
            *("_capture_descs", "_candidates", "_graphs_captured", "_resolve_effective_loras"),
        ),
        "set",
        "graphs for drafts are added to those that are captured",
        _GRAPHS,
    ),
    Seam(
        _GRAPH_MODULE,
        "ModelCudaGraphManager",
        ("capture",),
        "overridden",
        "afterwards no builder uses buffers of a graph",
        _GRAPHS,
    ),
    Seam(
        _GRAPH_MODULE,
        "BatchExecutionDescriptor",
        ("cg_mode", "num_tokens", "num_reqs", "max_query_len", "num_active_loras", "num_ubatches"),
        "called",
        "describes a graph for drafts: its lengths vary, up to a bound",
        _GRAPHS,
    ),
    Seam(
        "vllm.config.compilation",
        "CUDAGraphMode",
        ("FULL", "NONE", "decode_mode", "mixed_mode"),
        "read",
        "where graphs of the whole model are wanted, and for which steps",
        PUBLIC,
    ),
    Seam(
        "vllm.config.compilation",
        "CompilationConfig",
        ("cudagraph_capture_sizes",),
        "read",
        "graphs for drafts have some of these numbers of tokens",
        PUBLIC,
    ),
    Seam(
        "vllm.v1.worker.gpu.attn_utils",
        "get_varlen_cudagraph_unsupported_backend",
        ("attn_groups", "vllm_config", "max_query_len"),
        "called",
        "whether a graph can run requests with various numbers of tokens",
        _GRAPHS,
    ),
    Seam(
        "vllm.v1.worker.gpu.model_states.interface",
        "ModelState",
        ("get_additional_cg_support",),
        "called",
        "the same for layers outside of the attention groups",
        _GRAPHS,
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionCGSupport",
        ("ALWAYS",),
        "read",
        "the same",
        PUBLIC,
    ),
    Seam(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("scheduled_cached_reqs", "scheduled_spec_decode_tokens"),
        "read",
        "the made-up requests of vLLM's warm-up, and their slots",
        _MEASURED,
    ),
    Seam(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("req_ids", "num_computed_tokens"),
        "read",
        "the made-up requests of vLLM's warm-up, which get drafts",
        _MEASURED,
    ),
)
