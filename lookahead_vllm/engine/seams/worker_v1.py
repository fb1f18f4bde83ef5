"""Workers, first model runner: the workers, the runner, its batch, sampling."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import Seam

_RUNNER = "vllm.v1.worker.gpu_model_runner"
_CLASS = "the runner class can be configured"
_TREES = "custom proposers may return trees"
_IDS = "custom proposers are called with request ids"

SEAMS = (
    # Workers: each makes its runner from a global name.
    Seam(
        "vllm.v1.worker.cpu_worker",
        "",
        ("CPUModelRunner",),
        "swapped",
        "our runner class while the worker makes its runner",
        _CLASS,
    ),
    # The runner: from a scheduled draft to the next one.
    Seam(
        _RUNNER,
        "GPUModelRunner._update_states",
        ("scheduler_output",),
        "overridden",
        "takes lookahead's options out of a new request's extra_args",
        "custom proposers are notified of new requests",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        ("scheduler_output", "num_scheduled_tokens"),
        "overridden",
        "recalls each scheduled draft's tree and sets positions by depth; hides speculative_config "
        "in a step without drafts, so that it costs as much as a plain one",
        _TREES,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._build_attention_metadata",
        ("num_tokens",),
        "overridden",
        "passes the trees to the attention metadata builders, and parents to recurrent layers",
        _TREES,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._sample",
        ("logits", "spec_decode_metadata"),
        "overridden",
        "samples at all nodes, then accepts the path that matches; moves the accepted tokens' KV",
        _TREES,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        ("scheduler_output", "sampler_output"),
        "overridden",
        "hides the generators of unfinished prefills, whose rewind kills CPU engines",
        "vLLM rewinds CPU generators by their state",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        ("scheduler_output", "sampled_token_ids", "sampling_metadata"),
        "overridden",
        "calls the drafter with request ids, once for all requests of the step",
        _IDS,
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        ("grammar_output",),
        "overridden",
        "attaches the next drafts and the step's report to the output",
        "custom proposers may report stats",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        ("common_attn_metadata",),
        "overridden",
        "near max_model_len each request has its own bound, not the whole batch",
        "custom proposers may answer it",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner._on_request_state_removed",
        ("req_id",),
        "overridden",
        "the end of a request; preemption does not call it",
        "custom proposers are notified of finished requests",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.shutdown",
        (),
        "overridden",
        "saves the cache file where the engine runs in the user's own process",
        "custom proposers are notified of the end",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache",
        ("kv_cache_config",),
        "overridden",
        "afterwards the KV tensors exist, and decide whether trees may branch",
        _TREES,
    ),
    # Sampling at nodes.
    Seam(
        _RUNNER,
        "",
        ("build_logitsprocs",),
        "swapped",
        "while a runner is made: the original leaves all processors but one out where drafts are "
        "verified",
        "vLLM serves them with speculation",
    ),
)
