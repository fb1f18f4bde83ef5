"""Workers, either model runner: what worker/ needs apart from attention."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

SEAMS = (
    Seam(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker",
        ("init_device", "compile_or_warm_up_model", "model_runner"),
        "overridden",
        "makes our runner, measures the cost of a step",
        "the runner class can be configured",
    ),
    Seam(
        "vllm.v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        ("vllm_config",),
        "called",
        "by the runner: makes our drafter from speculative_config.model",
        "SpeculativeConfig.method is open to plugins",
    ),
    Seam(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        (
            *("req_id", "sampling_params", "prompt_token_ids", "prefill_token_ids"),
            *("prompt_embeds", "prompt_is_token_ids", "mm_features"),
        ),
        "set",
        "a new request; sampling_params becomes a copy without lookahead's options",
        "custom proposers are notified of new requests",
    ),
    Seam(
        "vllm.multimodal.inputs",
        "MultiModalFeatureSpec",
        ("mm_position",),
        "read",
        "which tokens of a prompt stand for an image, and are no text",
        "custom proposers are notified of new requests",
    ),
    Seam(
        "vllm.multimodal.inputs",
        "PlaceholderRange",
        ("offset", "length", "is_embed"),
        "read",
        "see above",
        "custom proposers are notified of new requests",
    ),
    Seam(
        "vllm.tokenizers.registry",
        "cached_tokenizer_from_config",
        ("model_config",),
        "called",
        "a cache file belongs to one tokenizer",
        "a tokenizer has an identity",
    ),
    Seam(
        "vllm.triton_utils.dispatcher",
        "_rebind_kernels",
        ("overrides",),
        "read",
        "worked around: it fails once numba is loaded (drafter.py), with method ngram too",
        "it ignores attributes that are not dicts",
    ),
    # The cost of a step.
    Seam(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.broadcast_object",
        ("obj", "src"),
        "called",
        "all ranks run the same forward passes when the cost of a step is measured; all stages of "
        "a pipeline decide together whether trees may branch",
        "vLLM measures the cost of a step",
    ),
    Seam(
        "vllm.distributed.parallel_state",
        "get_pp_group",
        (),
        "called",
        "a step costs what it costs in all stages of a pipeline, and the last one accepts",
        PUBLIC,
    ),
    Seam(
        "vllm.distributed.parallel_state",
        "GroupCoordinator",
        ("is_last_rank", "world_size"),
        "read",
        "the stages of a pipeline",
        PUBLIC,
    ),
    Seam(
        "vllm.model_executor.models.interfaces_base",
        "VllmModelForTextGeneration",
        ("compute_logits",),
        "called",
        "its time is part of a step's",
        PUBLIC,
    ),
)
