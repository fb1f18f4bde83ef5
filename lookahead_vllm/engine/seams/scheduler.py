"""The engine core's process: the scheduler, its KV blocks, grammars, the stats of a step."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_LATE = "vLLM asks for drafts at the start of the step that verifies them"
_STAGES = "vLLM sends all stages of a pipeline what a step emitted"
_GRAMMARS = "vLLM applies structured output to draft trees"
_CUTS = "vLLM cuts drafts before it preempts or delays a request"
_BLOCKS = "vLLM frees blocks that hold only rejected tokens"

SEAMS = (
    # Drafts (scheduler/scheduler.py).
    Seam(
        _SCHEDULER,
        "Scheduler.schedule",
        (),
        "overridden",
        "cuts drafts so that they take nothing from any request (draft_limits.py); sends the trees "
        "of the step to the workers with their tokens",
        _CUTS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.update_from_output",
        ("scheduler_output",),
        "overridden",
        "drops the masks of the step; takes the next drafts, whose trees a grammar prunes, extends "
        "by what it dictates, and masks",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.finish_requests",
        (),
        "overridden",
        "drops the masks of a finished request",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.get_grammar_bitmask",
        ("scheduler_output",),
        "overridden",
        "sends the masks of the nodes to the runner",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids",
        ("draft_token_ids",),
        "called",
        "assigns the drafts of requests without a grammar",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler",
        (
            *("requests", "structured_output_manager", "num_spec_tokens", "max_model_len"),
            *("max_num_running_reqs", "dynamic_sd_lookup", "running", "waiting"),
            *("kv_holding_waiting", "max_num_active_reqs", "max_num_scheduled_tokens"),
            *("kv_cache_manager", "connector"),
        ),
        "set",
        "the requests, and the tokens and blocks of the next step; dynamic_sd_lookup is set so "
        "that no request is padded with placeholder drafts",
        _CUTS,
    ),
    Seam(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            *("scheduled_new_reqs", "scheduled_spec_decode_tokens", "num_scheduled_tokens"),
            *("total_num_scheduled_tokens", "finished_req_ids", "num_invalid_spec_tokens"),
            "has_structured_output_requests",
        ),
        "set",
        "the contents of a step; our trees are attached to it",
        "custom proposers may return trees",
    ),
    # Slots for drafts that workers grow late (scheduler/late_scheduler.py).
    Seam(
        _SCHEDULER,
        "Scheduler.add_request",
        ("request",),
        "overridden",
        "notes the requests that turned lookahead off: they get no slots",
        _LATE,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids_in_output",
        ("draft_token_ids", "scheduler_output"),
        "overridden",
        "fills the masks of the drafts in flight, which are trees",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.make_spec_decoding_stats",
        (
            *("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens"),
            *("num_invalid_spec_tokens", "request_id"),
        ),
        "overridden",
        "slots that were all left empty are no draft in vLLM's metrics",
        _LATE,
    ),
    Seam(
        "vllm.v1.request",
        "Request",
        ("max_tokens",),
        "read",
        "a request that ends with this step gets no slots",
        _LATE,
    ),
    Seam(
        "vllm.v1.request",
        "Request",
        ("resumable",),
        "read",
        "recurrent layers verify no drafts of a request that may continue with new input",
        "vLLM keeps the accepted tokens of a request",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager",
        "MambaManager",
        ("num_speculative_blocks",),
        "read",
        "state slots that a request gets with its first block",
        _CUTS,
    ),
    Seam(
        "vllm.v1.outputs",
        "DraftTokenIds",
        ("req_ids", "draft_token_ids"),
        "called",
        "the drafts of a step in flight; their trees are attached to it",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.post_step",
        ("model_executed",),
        "wrapped",
        "does not ask the worker for drafts: ours come with the output of their step",
        "drafts come with the output of their step",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore",
        ("scheduler",),
        "read",
        "whether the engine's scheduler is ours",
        "drafts come with the output of their step",
    ),
    # Limits for drafts (scheduler/draft_limits.py).
    Seam(
        "vllm.v1.request",
        "Request",
        ("spec_token_ids", "num_tokens", "num_computed_tokens", "num_output_placeholders"),
        "set",
        "the tokens that plain vLLM would schedule; spec_token_ids, the draft, is cut",
        _CUTS,
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        ("coordinator", "block_pool", "watermark_blocks"),
        "read",
        "the number of free blocks",
        _BLOCKS,
    ),
    Seam(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator",
        ("single_type_managers",),
        "read",
        "the KV cache groups",
        _BLOCKS,
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        ("block_size", "req_to_blocks"),
        "set",
        "the blocks of each request, from which those that hold only rejected tokens are removed",
        _BLOCKS,
    ),
    Seam(
        "vllm.v1.core.block_pool",
        "BlockPool",
        ("get_num_free_blocks", "free_blocks"),
        "called",
        "frees these blocks",
        _BLOCKS,
    ),
    # Pipelines (scheduler.py).
    Seam(
        "vllm.v1.request",
        "Request",
        ("status", "num_stale_output_tokens", "drop_stale_output"),
        "read",
        "requests that were preempted during a step of theirs, which have no draft and no KV",
        _STAGES,
    ),
    Seam("vllm.v1.request", "RequestStatus", ("RUNNING",), "read", "see above", _STAGES),
    Seam(
        "vllm.v1.outputs",
        "ModelRunnerOutput",
        ("sampled_token_ids", "req_id_to_index"),
        "read",
        "what a request emitted, for the stages that do not sample",
        _STAGES,
    ),
    # Grammars (grammar.py).
    Seam(
        "vllm.v1.request",
        "Request",
        (
            *("request_id", "sampling_params", "structured_output_request"),
            *("use_structured_output", "is_prefill_chunk", "is_finished", "num_output_tokens"),
        ),
        "set",
        "which drafts have a grammar, and how long they may be; sampling_params becomes a copy "
        "without references",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.request",
        "StructuredOutputRequest",
        ("grammar",),
        "read",
        "the request's grammar",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.__init__",
        "StructuredOutputManager",
        ("backend", "tokenizer", "_get_constraint_bounds", "grammar_bitmask"),
        "called",
        "whether a reasoning parser delays the grammar; masks of requests without a draft",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.__init__",
        "StructuredOutputManager",
        ("_masked_reasoning_ends",),
        "called",
        "tokens that may not end the reasoning; 0.32 has none",
        "0.32 is no longer supported",
        releases=("0.33",),
    ),
    Seam(
        "vllm.v1.structured_output.__init__",
        "ConstraintBounds",
        ("grammar_start", "constraint_start"),
        "read",
        "where the grammar, and where its masks, begin",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.backend_types",
        "StructuredOutputBackend",
        ("allocate_token_bitmask",),
        "called",
        "allocates the masks of the nodes",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.backend_types",
        "StructuredOutputGrammar",
        ("accept_tokens", "validate_tokens", "rollback", "fill_bitmask", "is_terminated"),
        "called",
        "walks the tree",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.backend_xgrammar",
        "XgrammarGrammar",
        ("matcher",),
        "read",
        "the only text with which the grammar lets the output continue",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.backend_guidance",
        "GuidanceGrammar",
        ("ll_matcher",),
        "read",
        "the only tokens with which the grammar lets the output continue",
        _GRAMMARS,
    ),
    Seam(
        "vllm.v1.structured_output.backend_guidance",
        "GuidanceGrammar.accept_tokens",
        ("request_id", "tokens"),
        "wrapped",
        "takes several tokens as it takes one after the other, also after its end",
        "vLLM's wrapper of llguidance does",
    ),
    Seam(
        "vllm.tokenizers.protocol",
        "TokenizerLike",
        ("encode", "get_vocab"),
        "called",
        "tokenizes the text that a grammar dictates; in a worker: a cache file belongs to one "
        "vocabulary",
        PUBLIC,
    ),
    # Lookahead parallelism (scheduler/replica_executor.py).
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor._init_executor",
        (),
        "overridden",
        "while it starts the workers, tensor_parallel_size counts the ranks of all replicas",
        "replicas of a model may share one engine",
    ),
    # The report of a step (step_report.py).
    Seam(
        _SCHEDULER,
        "Scheduler.make_stats",
        (),
        "overridden",
        "adds the report of the step to vLLM's stats",
        "vLLM's stats have room for a plugin's",
    ),
    Seam(
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        ("spec_decoding_stats",),
        "overridden",
        "a subclass with one more field",
        "vLLM's stats have room for a plugin's",
    ),
)
