"""Workers, second model runner: the runner, its batch, sampling, graphs of steps with drafts."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

_GPU = "vllm.v1.worker.gpu"
_RUNNER = f"{_GPU}.model_runner"
_CLASS = "the runner class can be configured"
_LATE = "vLLM asks for drafts at the start of the step that verifies them"
_TREES = "custom proposers may return trees"
_SAMPLED = "vLLM samples at the nodes of a tree"
_MEASURED = "vLLM measures the cost of a step"
_SAMPLE = f"{_GPU}.sample"
_GRAPHS = "vLLM captures graphs for steps with drafts of various lengths"
_PREPARED = "vLLM prepares a step before the tokens of the step before have arrived"

SEAMS = (
    # Workers: each makes its runner from a global name.
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
        (
            *("init_speculator", "RequestState", "Sampler", "RejectionSampler"),
            "StructuredOutputsWorker",
        ),
        "swapped",
        "while the runner is made: no drafts after a step, no texts on the device, a sampler whose "
        "logits can be observed, one that samples at the nodes, and grammar masks that grow",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner",
        (
            *("load_model", "initialize_kv_cache", "finish_requests", "update_requests"),
            *("add_requests", "take_draft_token_ids", "shutdown"),
        ),
        "overridden",
        "announces requests to the drafter and learns from what has ended; gives a grammar's "
        "scheduler the drafts of the step in flight",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.gather_batch_req_state",
        ("scheduler_output", "dummy_run"),
        "overridden",
        "waits for the tokens of the last step, drafts, and goes on with a trimmed copy, unless "
        "vLLM can prepare the step for all slots; decode_query_len is 1 while vLLM sorts the batch",
        _LATE,
    ),
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.execute_model",
        ("scheduler_output",),
        "overridden",
        "in a pipeline, all stages get the drafts first: vLLM begins with the hidden states",
        _LATE,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.update_pp_decode_requests",
        (),
        "overridden",
        "an earlier stage of a pipeline also moves the KV of accepted nodes",
        _SAMPLED,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.sample",
        (),
        "overridden",
        "in a pipeline, pads the tokens to the width that vLLM 0.33 sends; between replicas, all "
        "ranks get the same tokens",
        _SAMPLED,
    ),
    Seam(
        f"{_GPU}.pp_utils",
        "PPHandler",
        ("queue", "main_stream", "req_idx_gen_np"),
        "overridden",
        "the entry of a step, in which vLLM awaits its tokens, also holds its trees",
        _SAMPLED,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.prepare_inputs",
        ("scheduler_output",),
        "overridden",
        "gets the scheduler's output, or the trimmed copy",
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
        f"{_GPU}.model_states.default",
        "DefaultModelState",
        ("prepare_inputs", "rope_state"),
        "wrapped",
        "called after prepare_attn; shifts the M-RoPE positions of nodes in all dimensions",
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
        "GPUModelRunner._dummy_sampler_run",
        ("hidden_states",),
        "overridden",
        "allocates the logits of a step with the most nodes, so that vLLM counts them",
        _SAMPLED,
    ),
    Seam(
        "vllm.v1.worker.gpu.structured_outputs",
        "StructuredOutputsWorker",
        ("logits_indices", "grammar_bitmask", "copy_stream", "mask_stride"),
        "overridden",
        "masks for one row a request at first; more when a step needs them",
        _SAMPLED,
    ),
    Seam(
        "vllm.v1.worker.gpu.structured_outputs",
        "StructuredOutputsWorker.__init__",
        ("max_num_logits", "mask_stride"),
        "overridden",
        "the number of masks",
        _SAMPLED,
    ),
    Seam(
        "vllm.v1.worker.gpu.structured_outputs",
        "StructuredOutputsWorker.apply_grammar_bitmask",
        ("logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
        "overridden",
        "the masks of a step",
        _SAMPLED,
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
    # Sampling parameters that depend on a node's history.
    Seam(
        f"{_SAMPLE}.logits_processor.interface",
        "LogitsProcessor",
        ("add_request", "apply_staged_writes", "apply"),
        "overridden",
        "by the processors that follow the parents, and by one around each custom processor, which "
        "records the requests that it concerns: these get chains",
        PUBLIC,
    ),
    # CUDA (v2/gpu_worker.py): the worker, graphs of steps with drafts.
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker",
        ("init_device", "compile_or_warm_up_model", "_make_model_runner", "model_runner"),
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
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionMetadataBuilder.build_for_cudagraph_capture",
        ("common_attn_metadata",),
        "overridden",
        "keeps the lengths of requests in a measured pass with trees",
        _MEASURED,
    ),
    Seam(
        f"{_GPU}.cudagraph_utils",
        "CudaGraphManager.capture",
        ("create_forward_fn",),
        "overridden",
        "announces each graph, so that the builders of metadata use its buffers",
        _GRAPHS,
    ),
    Seam(
        f"{_GPU}.cudagraph_utils",
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
        f"{_GPU}.cudagraph_utils",
        "ModelCudaGraphManager",
        ("capture",),
        "overridden",
        "afterwards no builder uses buffers of a graph",
        _GRAPHS,
    ),
    Seam(
        f"{_GPU}.cudagraph_utils",
        "ModelCudaGraphManager.run_fullgraph",
        ("desc",),
        "overridden",
        "the drafts are placed before a graph is replayed, and choose the graph",
        _PREPARED,
    ),
)
