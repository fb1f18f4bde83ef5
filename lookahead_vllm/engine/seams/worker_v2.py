"""The workers' processes, second model runner."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_CLASS = "the runner class can be configured"
_LATE = "vLLM asks for drafts at the start of the step that verifies them"
_TREES = "custom proposers may return trees"
_SAMPLED = "vLLM samples at the nodes of a tree"
_BLOCKS = "vLLM frees blocks that hold only rejected tokens"
_MEASURED = "vLLM measures the cost of a step"
_SAMPLE = "vllm.v1.worker.gpu.sample"
_PARENTS = "vLLM's processors know the parents of the rows"

SEAMS = (
    # Workers: each makes its runner from a global name.
    Seam(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker",
        ("init_device", "compile_or_warm_up_model", "model_runner"),
        "overridden",
        "makes our runner, measures the cost of a step",
        _CLASS,
    ),
    Seam(
        "vllm.v1.worker.cpu.model_runner",
        "",
        ("CPUModelRunner",),
        "swapped",
        "our runner class while the worker makes its runner",
        _CLASS,
    ),
    # The runner: what it is made of.
    Seam(
        _RUNNER,
        "",
        ("init_speculator", "RequestState", "Sampler", "RejectionSampler"),
        "swapped",
        "while the runner is made: no drafts after a step, no texts on the device, a sampler whose "
        "logits can be observed, and one that samples at the nodes",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner",
        (
            *("load_model", "initialize_kv_cache", "finish_requests", "update_requests"),
            *("add_requests", "sampler", "rejection_sampler", "attn_groups", "block_tables"),
            *("req_states", "device", "vllm_config", "model_config", "parallel_config"),
            *("compilation_config", "scheduler_config", "kv_cache_config", "lora_config", "model"),
            *("max_num_reqs", "max_num_tokens", "max_model_len", "take_draft_token_ids"),
            *("shutdown", "model_state"),
        ),
        "overridden",
        "announces requests to the drafter and learns from what has ended; gives a grammar's "
        "scheduler the drafts of the step under way",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.gather_batch_req_state",
        ("scheduler_output", "dummy_run"),
        "overridden",
        "waits for the tokens of the last step, drafts, and goes on with a trimmed copy",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.prepare_inputs",
        ("scheduler_output",),
        "overridden",
        "gets the trimmed copy",
        _LATE,
    ),
    Seam(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin._set_active_loras",
        ("prompt_lora_mapping",),
        "overridden",
        "gives each row of logits its adapter; called after prepare_inputs",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.prepare_attn",
        ("input_batch",),
        "overridden",
        "sets the positions of nodes after the KV slots were chosen; gives the trees to the "
        "attention backends",
        _TREES,
    ),
    Seam(
        "vllm.v1.worker.gpu.mm.rope",
        "",
        ("RopeState",),
        "swapped",
        "while the model is loaded: a state that shifts the M-RoPE positions of nodes",
        _TREES,
    ),
    Seam(
        "vllm.v1.worker.gpu.mm.rope",
        "RopeState",
        ("prepare_positions", "positions"),
        "overridden",
        "called after prepare_attn; shifts the positions of nodes in all dimensions",
        _TREES,
    ),
    Seam(
        "vllm.v1.worker.gpu.model_states.default",
        "DefaultModelState",
        ("rope_state",),
        "read",
        "the state of M-RoPE positions",
        _TREES,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.prepare_dummy_attn",
        ("input_batch",),
        "overridden",
        "gives the trees of a measured pass to the attention backends",
        _MEASURED,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        ("grammar_output",),
        "overridden",
        "keeps the output, whose tokens the next drafts need; attaches the report of the step",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._dummy_run",
        ("num_tokens", "context_len", "skip_eplb"),
        "called",
        "runs the passes that are timed",
        _MEASURED,
    ),
    Seam(
        "vllm.v1.worker.gpu.async_utils",
        "AsyncOutput",
        ("copy_event", "sampled_token_ids", "num_sampled_tokens_np", "model_runner_output"),
        "read",
        "the tokens of a step, once the device is done with it",
        _LATE,
    ),
    Seam(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        (
            *("req_ids", "num_reqs", "num_scheduled_tokens", "cu_num_logits", "cu_num_logits_np"),
            *("logits_indices", "positions", "input_ids", "has_prefill", "idx_mapping"),
            *("idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens"),
            *("seq_lens_cpu_upper_bound", "num_computed_tokens_np", "is_prefilling_np"),
        ),
        "set",
        "the rows of a step; the positions of nodes, and exact lengths on the host, are set",
        _TREES,
    ),
    Seam(
        "vllm.v1.worker.gpu.input_batch",
        "get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
        "called",
        "the counts of a step with trees; none for an unfinished prompt",
        _SAMPLED,
    ),
    Seam(
        "vllm.v1.worker.gpu.states",
        "RequestState",
        ("req_id_to_index", "draft_tokens", "prefill_len"),
        "set",
        "the table of draft tokens, from which vLLM takes the input of a step",
        _LATE,
    ),
    Seam(
        "vllm.v1.worker.gpu.states",
        "RequestState.__init__",
        ("use_dense_all_token_ids",),
        "called",
        "false: the method under which vLLM knows us would keep all texts on the device",
        "SpeculativeConfig.method is open to plugins",
    ),
    Seam(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables",
        ("num_blocks",),
        "set",
        "the blocks that a request keeps when it gives some back",
        _BLOCKS,
    ),
    Seam(
        "vllm.v1.worker.utils",
        "AttentionGroup",
        ("layer_names", "get_metadata_builder"),
        "called",
        "the builders that get the trees",
        _TREES,
    ),
    # Copies of grammars, for what they dictate.
    Seam(
        "vllm.v1.structured_output.__init__",
        "StructuredOutputManager",
        ("grammar_init", "accept_tokens", "clear_backend"),
        "called",
        "a second copy of each grammar on the drafting rank, one step ahead of the scheduler's",
        "the scheduler tells a worker what the grammar dictates",
    ),
    Seam(
        "vllm.v1.request",
        "Request",
        ("append_output_token_ids", "use_structured_output", "structured_output_request"),
        "called",
        "the text that a grammar's copy has read",
        "the scheduler tells a worker what the grammar dictates",
    ),
    # Sampling at nodes.
    Seam(
        f"{_SAMPLE}.sampler",
        "Sampler",
        ("__call__", "compute_nans", "req_states", "logprob_token_ids_state", "logprobs_mode"),
        "overridden",
        "lets proposers observe the logits of a step; samples at all nodes of a step",
        _SAMPLED,
    ),
    Seam(
        f"{_SAMPLE}.sampler",
        "Sampler.get_logprobs_dims",
        ("idx_mapping_np",),
        "called",
        "how many logprobs the requests of a step want",
        _SAMPLED,
    ),
    Seam(
        f"{_SAMPLE}.sampler",
        "Sampler.sample",
        (
            *("logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos"),
            *("input_ids", "expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs"),
        ),
        "called",
        "draws at every root and node, by seed and position",
        _SAMPLED,
    ),
    Seam(
        f"{_SAMPLE}.logprob",
        "compute_topk_scores",
        (
            *("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits"),
            *("logprob_token_ids_state", "expanded_idx_mapping", "max_per_req_token_ids"),
            "logits_mode",
        ),
        "called",
        "logprobs along the accepted path",
        _SAMPLED,
    ),
    Seam(
        f"{_SAMPLE}.output",
        "SamplerOutput",
        (
            *("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled"),
            "num_rejected",
        ),
        "called",
        "the output of a step with trees",
        _SAMPLED,
    ),
    # Sampling parameters that depend on a node's history.
    Seam(
        f"{_SAMPLE}.sampler",
        "Sampler",
        ("logits_processors", "thinking_budget_state", "needs_logits_processing"),
        "set",
        "processors that follow the parents of a step with branching trees, and share the state of "
        "vLLM's",
        _PARENTS,
    ),
    Seam(
        f"{_SAMPLE}.logits_processor.interface",
        "LogitsProcessor",
        ("add_request", "apply_staged_writes", "apply"),
        "overridden",
        "by the processors that follow the parents, and by one around each custom processor, which "
        "records the requests that it concerns: these get chains",
        PUBLIC,
    ),
    Seam(
        f"{_SAMPLE}.logits_processor.interface",
        "LogitsContext",
        ("expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "input_ids"),
        "read",
        "the rows of a step",
        PUBLIC,
    ),
    Seam(
        f"{_SAMPLE}.logits_processor.interface",
        "LogitsProcRequestState",
        ("all_token_ids", "prompt_len", "total_len"),
        "read",
        "the texts that the history of a node begins with",
        PUBLIC,
    ),
    Seam(
        f"{_SAMPLE}.penalties",
        "PenaltiesState",
        (
            *("use_penalty", "repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("prompt_bin_mask", "output_bin_counts"),
        ),
        "read",
        "penalties at nodes",
        _PARENTS,
    ),
    Seam(
        f"{_SAMPLE}.bad_words",
        "BadWordsState",
        ("bad_word_token_ids", "bad_word_offsets", "num_bad_words", "req_states"),
        "read",
        "bad words at nodes",
        _PARENTS,
    ),
    Seam(
        f"{_SAMPLE}.logit_bias",
        "LogitBiasState",
        (),
        "read",
        "the only processor that needs no parents: min_tokens goes by position",
        _PARENTS,
    ),
    Seam(
        f"{_SAMPLE}.thinking_budget",
        "ThinkingBudgetState",
        (
            *("enabled", "use_thinking_budget", "thinking_token_budget", "req_states"),
            *("cached_last_start", "cached_last_end", "cached_scan_pos"),
            *("reasoning_start_token_ids", "natural_reasoning_end_token_ids"),
            "reasoning_end_token_ids",
        ),
        "set",
        "thinking budgets at nodes; the cached positions are updated as vLLM updates them",
        _PARENTS,
    ),
    Seam(
        "vllm.v1.worker.gpu.states",
        "RequestState",
        ("all_token_ids", "prompt_len", "total_len"),
        "read",
        "as of LogitsProcRequestState, for thinking budgets",
        PUBLIC,
    ),
    Seam(
        "vllm.v1.worker.gpu.buffer_utils",
        "StagedWriteTensor",
        ("gpu",),
        "read",
        "the device's part of the processors' state",
        _PARENTS,
    ),
    Seam(
        "vllm.v1.worker.gpu.buffer_utils",
        "UvaBackedTensor",
        ("gpu", "np"),
        "read",
        "the device's part of the processors' state",
        _PARENTS,
    ),
)
