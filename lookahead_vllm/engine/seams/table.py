"""Every place where lookahead-vllm touches vLLM, in one table; `release.py` checks it."""

from __future__ import annotations

from typing import NamedTuple


class Seam(NamedTuple):
    """One place in vLLM that we override, wrap or read.

    `needs` are parameters where `name` is a function, attributes or methods where it is a class,
    and what the module binds where `name` is empty. A place that not all supported releases have
    names those that have it in `releases`, as in "0.33".
    """

    module: str
    name: str
    needs: tuple[str, ...]
    why: str
    until: str
    releases: tuple[str, ...] = ()


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_PUBLIC = "never: it is public"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_ENGINES = (("async_llm", "AsyncLLM"), ("llm_engine", "LLMEngine"))

SEAMS = (
    # Configuration: two wrapped functions, the only ones that are touched without being asked for.
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        ("parser",),
        "wrapped: adds --speculative-model and --num-speculative-tokens, aliases of --spec-*",
        "vLLM lets plugins register flags",
    ),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("self",),
        "wrapped: turns method 'lookahead' into a custom_class config and picks our worker",
        "SpeculativeConfig.method is open to plugins",
    ),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs",
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "read: the spellings under which a user can ask for lookahead",
        "as above",
    ),
    Seam(
        "vllm.config.model",
        "ModelConfig",
        ("get_hidden_size", "get_total_num_hidden_layers", "get_vocab_size"),
        "called: how large the model is, by which the paper chooses a window",
        _PUBLIC,
    ),
    Seam(
        "vllm.v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        ("vllm_config",),
        "called by the runner: builds our drafter from speculative_config.model",
        "as above",
    ),
    # The front-end: what a request says about itself, and does not reach the worker otherwise.
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        (),
        "wrapped: checks a request's lookahead options and sends them, with its namespace, along",
        "plugins may process requests; NewRequestData has cache_salt",
    ),
    *(
        Seam(
            f"vllm.v1.engine.{module}",
            f"{name}.add_request",
            ("request_id", "prompt"),
            "wrapped: the same for an EngineCoreRequest that a caller made",
            "vLLM takes none any more",
        )
        for module, name in _ENGINES
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        ("prompt", "sampling_params"),
        "wrapped: refuses a bad request before a stream starts, so that HTTP answers 400; "
        "tokenizes references off the event loop, and counts those of all live requests",
        "vLLM validates a request before it streams",
    ),
    Seam(
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest.to_sampling_params",
        (),
        "wrapped: OpenAI's field `prediction` becomes the request's reference",
        "vLLM reads `prediction`",
    ),
    Seam(
        "vllm.v1.engine.__init__",
        "EngineCoreRequest",
        ("sampling_params", "lora_request", "cache_salt"),
        "read: the parts of a namespace; set: sampling_params, a copy with other extra_args",
        "as above",
    ),
    Seam(
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("speculative_config",),
        "wrapped: min_p and logit_bias work on trees, and are not refused",
        "vLLM serves them with speculation",
    ),
    Seam(
        "vllm.renderers.base",
        "BaseRenderer",
        ("tokenizer", "tokenize_prompts", "tokenize_prompts_async"),
        "called: tokenizes references as prompts are tokenized",
        "as above",
    ),
    # Workers: each builds its runner from a global name, which is ours while it does so.
    Seam(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker",
        ("init_device", "compile_or_warm_up_model", "model_runner"),
        "overridden: builds our runner, measures the cost of a step",
        "the runner class can be configured",
    ),
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker",
        ("init_device", "compile_or_warm_up_model", "_make_model_runner", "model_runner"),
        "overridden: builds our runner, measures the cost of a step",
        "the runner class can be configured",
    ),
    # Sampling at nodes.
    Seam(
        "vllm.v1.sample.logits_processor.__init__",
        "build_logitsprocs",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
        "wrapped while a runner is built: it leaves all but one out where drafts are verified; "
        "called: a second set for the nodes",
        "vLLM serves them with speculation",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.interface",
        "BatchUpdate",
        ("batch_size", "removed", "added", "moved"),
        "made: tells the second set of the nodes of a step",
        "logits processors are told of draft tokens",
    ),
    Seam(
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder",
        ("_state", "cu_num_tokens", "_mask_capacity", "in_spec_mode"),
        "copied: each node goes on from its parent's state",
        "as above",
    ),
    Seam(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        (
            "temperature",
            "top_p",
            "top_k",
            "generators",
            "no_penalties",
            "prompt_token_ids",
            "frequency_penalties",
            "presence_penalties",
            "repetition_penalties",
            "output_token_ids",
            "allowed_token_ids_mask",
            "bad_words_token_ids",
            "logitsprocs",
            "logprob_token_ids",
            "spec_token_ids",
            "thinking_budget_state_holder",
        ),
        "copied: every field that has a row for each request gets one for each node",
        "as above",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        (
            "logits",
            "expanded_idx_mapping",
            "temperature",
            "seed",
            "pos",
            "apply_temperature",
            "is_drafting",
            "use_fp64",
        ),
        "called, in the place of the first runner's draws: seeded requests say what they say under "
        "the second one",
        "lookahead runs on the second model runner",
    ),
    # The model runner: what happens to a draft between scheduling and sampling.
    Seam(
        _RUNNER,
        "GPUModelRunner",
        (
            "input_batch",
            "requests",
            "positions",
            "discard_request_mask",
            "kv_cache_config",
            "drafter",
            "uses_mrope",
            "lora_config",
            "sampler",
            "speculative_config",
            "model_config",
        ),
        "read: the batch that is being verified",
        "custom proposers may return trees",
    ),
    Seam(
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        (
            "prompt_token_ids",
            "prompt_is_token_ids",
            "sampling_params",
            "output_token_ids",
            "block_ids",
        ),
        "read: what is known of a request, its prompt among it; the batch's rows keep what a "
        "request has not written",
        "custom proposers are called with request ids",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._update_states",
        ("scheduler_output",),
        "overridden: takes lookahead's part out of a new request's extra_args",
        "custom proposers are told of new requests",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        ("scheduler_output", "num_scheduled_tokens"),
        "overridden: recalls each scheduled draft's tree and sets positions by depth; keeps the "
        "first of what it returns, the tokens that logits are taken at; hides "
        "speculative_config in a step without drafts, so that it costs what a plain one does",
        "as above",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._build_attention_metadata",
        (),
        "overridden: hands the trees to the attention metadata builders",
        "as above",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._sample",
        ("logits", "spec_decode_metadata"),
        "overridden: sample, then match, on trees; moves the accepted tokens' KV",
        "as above",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        ("scheduler_output", "sampler_output"),
        "overridden: hides the generators of unfinished prefills, whose rewind kills CPU engines",
        "vLLM rewinds CPU generators by their state",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        ("scheduler_output", "sampled_token_ids", "sampling_metadata"),
        "overridden: gives the proposer request ids and all requests of the step at once",
        "custom proposers are called with request ids",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        ("common_attn_metadata",),
        "overridden: near max_model_len each request is bounded by itself, not the whole batch",
        "custom proposers may answer it",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._on_request_state_removed",
        ("req_id",),
        "overridden: the end of a request, which preemption is not",
        "custom proposers are told of finished requests",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.shutdown",
        (),
        "overridden: saves the cache file where the engine lives in the user's own process",
        "custom proposers are told of the end",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache",
        ("kv_cache_config",),
        "overridden: afterwards the KV tensors exist, and it is known whether trees may branch",
        "as above",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._dummy_run",
        ("num_tokens", "force_attention", "profile_seq_lens", "skip_eplb", "uniform_decode"),
        "called: measures the cost of a step by its tokens, requests and contexts",
        "vLLM measures it",
    ),
    # Where ranks share a model, the first one drafts, and says what all of them measure.
    Seam(
        "vllm.config.parallel",
        "ParallelConfig",
        (
            *("rank", "world_size", "distributed_executor_backend"),
            *("decode_context_parallel_size", "prefill_context_parallel_size", "use_ubatching"),
        ),
        "read: which rank of its engine a worker is, and whether a step is one batch of them",
        _PUBLIC,
    ),
    Seam(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.broadcast_object",
        ("obj",),
        "called: all ranks run the same forward passes when the cost of a step is measured",
        "vLLM measures it",
    ),
    # The end of an engine process, which saves the cache file.
    Seam(
        "vllm.v1.engine.core",
        "EngineCoreProc._handle_shutdown",
        ("self",),
        "wrapped: saves when the loop ends, and when requests begin to be drained; teardown begins "
        "with taking away the signal handlers, and then the front-end's SIGTERM kills where a "
        "process group had one already",
        "signal handlers stay until teardown is done",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCoreProc",
        ("shutdown_state",),
        "read: whether this process was just asked to end",
        "as above",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineShutdownState",
        ("REQUESTED",),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore",
        ("model_executor",),
        "read: where the workers are",
        "as above",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor.shutdown",
        (),
        "called before the teardown calls it: ends the workers, which save, and waits for them for "
        "$VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, which becomes 15 where it is not set",
        "as above",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor",
        ("workers",),
        "read: waits for them where another thread ends them",
        "as above",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "WorkerProcHandle",
        ("proc",),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.executor.abstract",
        "Executor.collective_rpc",
        ("method", "timeout"),
        "called: the worker that drafts begins to save while requests are drained",
        "as above",
    ),
    Seam(
        "vllm.v1.engine.utils",
        "CoreEngineProcManager.shutdown",
        ("timeout",),
        "wrapped: gives an engine process 20 s to end; unless --shutdown-timeout is set, vLLM "
        "kills it in the moment in which it asks it to end",
        "vLLM waits for the teardown of an engine process",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.shutdown",
        ("timeout",),
        "wrapped: ends the task that waits for outputs before the engine is gone, not afterwards; "
        "else it logs an error at every end of a server that saves",
        "vLLM ends it first",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        ("output_handler",),
        "read: that task",
        "as above",
    ),
    Seam(
        "vllm.v1.engine.utils",
        "CoreEngineProcManager",
        ("_request_shutdown_timeout",),
        "read: whether requests may be drained",
        "as above",
    ),
    Seam(
        "vllm.tokenizers.registry",
        "cached_tokenizer_from_config",
        ("model_config",),
        "called: a cache file belongs to one tokenizer",
        "a tokenizer says which one it is",
    ),
    # The scheduler: drafts under a grammar are trees.
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("scheduler_output",),
        "overridden: the masks of a step end with it; takes the next drafts, of which a grammar "
        "prunes the tree, adds what it dictates, and masks every node",
        "structured output knows of trees",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.finish_requests",
        (),
        "overridden: those of a request end with it",
        "as above",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_draft_token_ids",
        ("draft_token_ids",),
        "called: gives requests the drafts that no grammar looks at",
        "as above",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.get_grammar_bitmask",
        ("scheduler_output",),
        "overridden: hands the masks of the nodes to the runner",
        "as above",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        (),
        "overridden: cuts drafts so that they take nothing from any request (room.py); sends the "
        "shape of a tree under a grammar along with its tokens",
        "vLLM cuts drafts before it preempts or delays a request",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        (
            "requests",
            "structured_output_manager",
            "num_spec_tokens",
            "max_model_len",
            "max_num_running_reqs",
            "dynamic_sd_lookup",
            "running",
            "waiting",
            "kv_holding_waiting",
            "max_num_active_reqs",
            "max_num_scheduled_tokens",
            "kv_cache_manager",
            "connector",
        ),
        "read: the requests whose drafts a grammar looks at, what the next step has room for; set: "
        "dynamic_sd_lookup, so that no request is padded with placeholder drafts",
        "as above",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        ("coordinator", "block_pool", "watermark_blocks"),
        "read: free blocks; called: takes back those that hold rejected tokens alone",
        "vLLM takes them back",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        ("block_size", "req_to_blocks"),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.core.block_pool",
        "BlockPool",
        ("get_num_free_blocks", "free_blocks"),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.request",
        "Request",
        ("spec_token_ids", "num_tokens", "num_computed_tokens", "num_output_placeholders"),
        "read: what plain vLLM would schedule; set: the draft, cut",
        "as above",
    ),
    Seam(
        "vllm.v1.worker.block_table",
        "BlockTable",
        ("block_size", "block_table", "num_blocks_per_row", "slot_mapping", "commit_block_table"),
        "set: the rows of requests that gave blocks back; filled while attention is measured",
        "as above",
    ),
    Seam(
        "vllm.v1.structured_output.__init__",
        "StructuredOutputManager",
        ("backend", "tokenizer", "_get_constraint_bounds", "grammar_bitmask"),
        "called: whether a reasoning parser keeps the grammar waiting; masks without a draft",
        "as above",
    ),
    Seam(
        "vllm.v1.structured_output.backend_guidance",
        "GuidanceGrammar.accept_tokens",
        ("request_id", "tokens"),
        "wrapped: takes several tokens as it takes one after the other, also behind its end",
        "vLLM's wrapper of llguidance does",
    ),
    Seam(
        "vllm.v1.structured_output.backend_types",
        "StructuredOutputGrammar",
        ("accept_tokens", "validate_tokens", "rollback", "fill_bitmask", "is_terminated"),
        "called: walks the tree",
        "as above",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.post_step",
        ("model_executed",),
        "wrapped: our drafts come with the output of their step, so nobody asks for them",
        "drafts come with the output of their step",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore",
        ("scheduler",),
        "read: whether the engine is ours",
        "as above",
    ),
    # Metrics: a step's report rides on its output and its stats, to a logger beside vLLM's own.
    Seam(
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        ("grammar_output",),
        "overridden: attaches the next drafts and the step's report to its output",
        "custom proposers may report stats",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.make_stats",
        (),
        "overridden: puts the report of the step beside vLLM's stats",
        "as above",
    ),
    Seam(
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        ("spec_decoding_stats",),
        "subclassed: one field more",
        "as above",
    ),
    Seam(
        "vllm.v1.engine.__init__",
        "EngineCoreOutputs",
        ("scheduler_stats",),
        "subclassed: the field gets through to the front-end",
        "as above",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "MPClient",
        ("decoder",),
        "built from the global name EngineCoreOutputs, which becomes our subclass",
        "as above",
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.__init__",
        ("vllm_config", "custom_stat_loggers"),
        "wrapped: adds our logger where vLLM makes its own",
        "a stat_logger_plugin does not turn the stats of every server on",
    ),
    # Attention on CPU.
    Seam(
        _CPU_ATTENTION,
        "CPUAttentionBackendImpl.forward",
        ("query", "kv_cache", "attn_metadata", "output"),
        "overridden: rows of a branching tree get tree attention, all others the native kernel",
        "the native kernel takes a mask",
    ),
    Seam(
        _CPU_ATTENTION,
        "CPUAttentionMetadataBuilder",
        ("build", "isa", "_set_isa_to_layers"),
        "overridden: carries the trees; read: which layout the KV cache of its layers has",
        "as above",
    ),
    Seam(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        ("backend", "class_path"),
        "called: puts our backends in the places of CPU_ATTN, FLASH_ATTN and TRITON_ATTN, in "
        "workers that serve lookahead",
        "the CPU attention backend can be chosen by flag",
    ),
    # Attention on CUDA.
    *(
        row
        for module, name in (("flash_attn", "FlashAttention"), ("triton_attn", "TritonAttention"))
        for row in (
            Seam(
                f"vllm.v1.attention.backends.{module}",
                f"{name}Backend",
                ("get_impl_cls", "get_builder_cls"),
                "overridden: names the two classes below",
                "as above",
            ),
            Seam(
                f"vllm.v1.attention.backends.{module}",
                f"{name}MetadataBuilder.build",
                ("common_prefix_len", "common_attn_metadata", "fast_build"),
                "overridden: lays out the trees; tells vLLM's kernel that they have no context",
                "as above",
            ),
            Seam(
                f"vllm.v1.attention.backends.{module}",
                f"{name}Impl.forward",
                ("query", "kv_cache", "attn_metadata", "output"),
                "overridden: afterwards the rows of branching trees are overwritten",
                "attention metadata carries a mask for each request",
            ),
            Seam(
                f"vllm.v1.attention.backends.{module}",
                f"{name}Impl",
                (
                    *("head_size", "scale", "sliding_window", "alibi_slopes"),
                    *("logits_soft_cap", "sinks", "attn_type", "kv_cache_dtype"),
                    *("num_heads", "num_kv_heads"),
                ),
                "read: what a layer's attention is",
                "as above",
            ),
        )
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._determine_batch_execution_and_padding",
        (),
        "wrapped: no CUDA graph of the whole model for a step with trees",
        "as above",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner",
        ("cudagraph_dispatcher", "uniform_decode_query_len"),
        "set to 1, in the dispatcher too: graphs of the whole model are for steps without drafts, "
        "and those of its pieces keep their sizes",
        "capture sizes of decodes and of other steps are two lists",
    ),
    Seam(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher",
        ("uniform_decode_query_len",),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher.dispatch",
        ("invalid_modes",),
        "wrapped during that call",
        "as above",
    ),
    Seam(
        "vllm.triton_utils.dispatcher",
        "_rebind_kernels",
        ("overrides",),
        "worked around: it fails once numba is loaded (see drafter.py), as with method ngram too",
        "it passes over attributes that are not dicts",
    ),
    Seam(
        "vllm.v1.attention.selector",
        "_cached_get_attn_backend",
        ("attn_selector_config",),
        "its cache is cleared: a plain engine in the same process may have filled it",
        "as above",
    ),
    # What is read, or called, on the way: the engine's config.
    Seam(
        "vllm.config.vllm",
        "VllmConfig",
        (
            *("model_config", "cache_config", "parallel_config", "scheduler_config"),
            *("speculative_config", "kv_transfer_config", "additional_config", "compute_hash"),
            *("compilation_config", "use_v2_model_runner"),
        ),
        "read: what the engine is; set: additional_config, in which our options ride",
        _PUBLIC,
    ),
    Seam(
        "vllm.config.model",
        "ModelConfig",
        (
            *("model", "hf_text_config", "runner_type", "is_hybrid", "is_attention_free"),
            *("is_encoder_decoder", "is_mm_prefix_lm", "rswa_window", "logits_processors"),
            *("served_model_name", "seed", "max_model_len"),
        ),
        "read: which models lookahead serves, and with trees",
        _PUBLIC,
    ),
    Seam(
        "vllm.config.parallel",
        "ParallelConfig",
        ("pipeline_parallel_size", "data_parallel_index", "worker_cls"),
        "read: what is refused; set: worker_cls",
        _PUBLIC,
    ),
    Seam(
        "vllm.config.scheduler",
        "SchedulerConfig",
        ("scheduler_cls", "max_num_seqs", "max_num_batched_tokens"),
        "read: bounds of a step; set: scheduler_cls",
        _PUBLIC,
    ),
    Seam(
        "vllm.config.speculative",
        "SpeculativeConfig",
        ("model",),
        "read: whether it is ours",
        _PUBLIC,
    ),
    Seam("vllm.config.cache", "CacheConfig", ("cache_dtype",), "read: of the KV cache", _PUBLIC),
    Seam(
        "vllm.config.compilation",
        "CompilationConfig",
        ("static_forward_context", "cudagraph_mode"),
        "read: the attention layers; which steps run as CUDA graphs",
        "the runner offers its layers",
    ),
    Seam(
        "vllm.config.compilation",
        "CUDAGraphMode",
        ("FULL", "has_full_cudagraphs"),
        "as above",
        _PUBLIC,
    ),
    Seam(
        "vllm.envs",
        "",
        ("VLLM_USE_RUST_FRONTEND", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CACHE_ROOT"),
        "read: two are refused; where measured costs are kept",
        _PUBLIC,
    ),
    Seam(
        "vllm",
        "",
        ("__version__", "__version_tuple__"),
        "read: measured costs belong to one version; 0.33 takes equally many masks of every "
        "request of a step, 0.32 does not (EQUALLY_MANY_MASKS)",
        "0.32 is no longer supported",
    ),
    Seam(
        "vllm.platforms.interface",
        "Platform",
        ("fp8_dtype", "get_device_name", "is_cpu"),
        "read: the device",
        _PUBLIC,
    ),
    Seam(
        "vllm.logger",
        "_VllmLogger",
        ("info_once", "warning_once", "error_once"),
        "called",
        _PUBLIC,
    ),
    # The same: requests.
    Seam(
        "vllm.sampling_params",
        "SamplingParams",
        (
            *("extra_args", "max_tokens", "min_tokens", "stop_token_ids", "eos_token_id"),
            *("min_p", "logit_bias", "structured_outputs", "n"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        ),
        "read: what a request asks for; set: extra_args, in a copy",
        _PUBLIC,
    ),
    Seam("vllm.lora.request", "LoRARequest", ("lora_name",), "read: part of a namespace", _PUBLIC),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor",
        ("vllm_config", "model_config", "renderer"),
        "read: what a request is checked against",
        "as above",
    ),
    *(
        Seam(
            f"vllm.v1.engine.{module}",
            name,
            ("vllm_config", "model_config", "renderer", "input_processor"),
            "as above",
            "as above",
        )
        for module, name in _ENGINES
    ),
    Seam(
        "vllm.renderers.params",
        "TokenizeParams",
        ("max_total_tokens", "add_special_tokens"),
        "made: how references are tokenized",
        "as above",
    ),
    Seam(
        "vllm.tokenizers.protocol",
        "TokenizerLike",
        ("encode", "get_vocab"),
        "called: tokenizes what a grammar dictates; a cache file belongs to one vocabulary",
        _PUBLIC,
    ),
    Seam(
        "vllm.v1.request",
        "Request",
        (
            *("request_id", "sampling_params", "structured_output_request"),
            *("use_structured_output", "is_prefill_chunk", "is_finished", "num_output_tokens"),
        ),
        "read: which drafts a grammar looks at, and how long they may be",
        "structured output knows of trees",
    ),
    Seam(
        "vllm.v1.structured_output.request",
        "StructuredOutputRequest",
        ("grammar",),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.structured_output.__init__",
        "ConstraintBounds",
        ("grammar_start", "constraint_start"),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.structured_output.__init__",
        "StructuredOutputManager",
        ("_masked_reasoning_ends",),
        "called: tokens with which the reasoning cannot end; 0.32 knows none",
        "0.32 is no longer supported",
        releases=("0.33",),
    ),
    Seam(
        "vllm.v1.structured_output.backend_types",
        "StructuredOutputBackend",
        ("allocate_token_bitmask",),
        "called: room for the masks of the nodes",
        "as above",
    ),
    Seam(
        "vllm.v1.structured_output.backend_xgrammar",
        "XgrammarGrammar",
        ("matcher",),
        "read: the one text with which it lets an answer go on",
        "as above",
    ),
    Seam(
        "vllm.v1.structured_output.backend_guidance",
        "GuidanceGrammar",
        ("ll_matcher",),
        "as above",
        "as above",
    ),
    # The same: a step.
    Seam(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_spec_decode_tokens", "num_scheduled_tokens"),
        "read: what a step does",
        "custom proposers may return trees",
    ),
    Seam(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        ("req_id", "sampling_params", "prompt_token_ids"),
        "read: a new request; set: sampling_params, a copy without our part",
        "as above",
    ),
    Seam(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator",
        ("single_type_managers",),
        "read: free blocks",
        "vLLM takes back blocks that hold rejected tokens alone",
    ),
    Seam(
        _RUNNER,
        "",
        ("build_logitsprocs",),
        "wrapped while a runner is built, see build_logitsprocs",
        "as above",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner",
        (
            *("_attn_group_iterator", "_sync_device", "max_num_tokens", "model", "device"),
            *("vllm_config", "cache_config", "compilation_config", "parallel_config"),
            *("scheduler_config", "seq_lens"),
        ),
        "read: the batch, and how it is attended to",
        "as above",
    ),
    Seam(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        (
            *("req_id_to_index", "req_ids", "num_reqs", "token_ids_cpu", "num_prompt_tokens"),
            *("num_tokens_no_spec", "num_computed_tokens_cpu", "block_table", "generators"),
            *("sampling_metadata", "thinking_budget_state_holder"),
        ),
        "read: the rows of the batch",
        "as above",
    ),
    Seam(
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        ("block_ids", "sampling_params", "output_token_ids"),
        "read: what a row stands for; set: block_ids, without those given back",
        "as above",
    ),
    Seam(
        "vllm.v1.worker.block_table",
        "MultiGroupBlockTable",
        ("block_tables",),
        "read: the tables of all KV cache groups",
        "as above",
    ),
    Seam("vllm.v1.utils", "CpuGpuBuffer", ("np", "gpu"), "read: buffers of the runner", "as above"),
    Seam(
        "vllm.v1.kv_cache_interface",
        "KVCacheConfig",
        ("kv_cache_groups", "num_blocks"),
        "read: the KV cache",
        "as above",
    ),
    Seam(
        "vllm.v1.kv_cache_interface",
        "KVCacheGroupSpec",
        ("layer_names",),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.v1.worker.utils",
        "AttentionGroup",
        ("backend", "layer_names", "get_metadata_builder"),
        "read: the builders that are handed the trees",
        "as above",
    ),
    Seam(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        ("num_draft_tokens",),
        "read: how many nodes each request has",
        "as above",
    ),
    Seam(
        "vllm.v1.outputs",
        "SamplerOutput",
        ("sampled_token_ids", "logprobs_tensors"),
        "made: of roots and nodes",
        "as above",
    ),
    Seam(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        ("max_num_logprobs",),
        "read",
        "as above",
    ),
    Seam(
        "vllm.v1.sample.sampler",
        "Sampler",
        ("topk_topp_sampler", "use_fp64_gumbel"),
        "read; set: topk_topp_sampler, see gumbel_sample",
        "as above",
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "TopKTopPSampler",
        ("logprobs_mode", "use_fp64_gumbel"),
        "read: ours does what it does",
        "as above",
    ),
    Seam(
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder",
        ("has_tracked_requests", "update_state", "apply_to_logits"),
        "called: for the nodes of a step",
        "as above",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.interface",
        "LogitsProcessor",
        ("apply", "update_state"),
        "as above",
        "as above",
    ),
    Seam(
        "vllm.model_executor.models.interfaces_base",
        "VllmModelForTextGeneration",
        ("compute_logits",),
        "called: its time is part of a step's",
        _PUBLIC,
    ),
    # The same: attention.
    Seam(
        "vllm.v1.attention.backends.registry",
        "AttentionBackendEnum",
        ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"),
        "replaced, see register_backend",
        "as above",
    ),
    Seam("vllm.v1.attention.backend", "AttentionType", ("DECODER",), "read", _PUBLIC),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionLayer",
        ("_q_scale", "_k_scale", "_v_scale"),
        "read: the scales of fp8",
        "attention metadata carries a mask for each request",
    ),
    Seam(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        ("num_reqs", "seq_lens"),
        "read: the rows of the batch",
        "as above",
    ),
    Seam(
        "vllm.model_executor.layers.attention.attention",
        "Attention",
        ("impl", "kv_cache"),
        "read: what a layer's attention is, and its part of the KV cache",
        "as above",
    ),
    Seam(_CPU_ATTENTION, "CPUAttentionMetadata", ("seq_lens",), "read", "as above"),
    Seam(_CPU_ATTENTION, "CPUAttentionMetadataBuilder", ("head_dim", "dtype"), "read", "as above"),
    *(
        row
        for module, name in (("flash_attn", "FlashAttention"), ("triton_attn", "TritonAttention"))
        for row in (
            Seam(
                f"vllm.v1.attention.backends.{module}",
                f"{name}Metadata",
                ("seq_lens",),
                "set to what the kernel is told of",
                "as above",
            ),
            Seam(
                f"vllm.v1.attention.backends.{module}",
                f"{name}MetadataBuilder",
                ("headdim",),
                "read",
                "as above",
            ),
        )
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl",
        ("use_alibi_sqrt", "chunk_lookback"),
        "read, where a layer has them: such layers get chains",
        "as above",
    ),
    Seam(
        "vllm.v1.worker.cpu_worker",
        "",
        ("CPUModelRunner",),
        "replaced while a worker builds its runner",
        "the runner class can be configured",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "",
        ("EngineCoreOutputs",),
        "replaced by our subclass",
        "as above",
    ),
)
