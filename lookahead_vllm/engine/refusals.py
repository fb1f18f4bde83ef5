"""What lookahead does not serve exactly: settings and models of vLLM, with the reason for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from lookahead_vllm.options.server import LookaheadOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": ("lookahead_vllm.engine.workers.cpu.LookaheadCPUWorker"),
    "vllm.v1.worker.gpu_worker.Worker": ("lookahead_vllm.engine.workers.gpu.LookaheadGPUWorker"),
}
"""Our worker by vLLM's."""

SPECULATION = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
"""What vLLM takes lookahead for: the only method without a draft model that it combines with
asynchronous scheduling."""

DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's methods whose drafters lookahead's trees may hold; "mtp" stands for all kinds of MTP."""

MAMBA_1_HYBRIDS = ("jamba",)
"""Types of models with attention and Mamba 1 layers."""

LEAVE_OUT = "leave lookahead out of the speculative config"

SETTINGS = {
    "": {
        "scheduler_config.scheduler_cls": "lookahead brings its own",
        "parallel_config.enable_batch_sharded_sampling": "then no rank has the logits of all nodes",
        "watermark_config": "a watermark is not verified at the nodes of a tree",
        "model_config.return_sampling_mask": "lookahead supports it only for one token a step",
        "model_config.enable_trace_replay": "it dictates the tokens that lookahead would verify",
    },
    "a hybrid model": {
        "cache_config.use_replayssm": "then recurrent layers keep no state for a node",
    },
    "drafter": {
        "speculative_config.parallel_drafting": "a chain is drafted token by token",
        "speculative_config.enable_adaptive_verification": "the budget decides what is verified",
        "speculative_config.use_local_argmax_reduction": "it hides how likely its tokens are",
        "speculative_config.num_speculative_tokens_per_batch_size": "the budget follows the batch",
        "parallel_config.pipeline_parallel_size": "the drafter is on the last stage",
    },
    "parallel": {
        "parallel_config.nnodes": "replicas are started on one machine",
        "parallel_config.pipeline_parallel_size": "a replica has one stage",
        "parallel_config.data_parallel_size": "replicas of several engines cannot be told apart",
        "parallel_config.decode_context_parallel_size": "chains cannot be shared",
        "parallel_config.prefill_context_parallel_size": "chains cannot be shared",
        "model_config.is_hybrid": "replicas do not exchange recurrent states",
        "kv_transfer_config": "each replica has all KV, and vLLM would transfer parts of it",
    },
}
"""Why a setting is refused that is neither off nor 1, with every engine or with what is named."""


def refusals(config: VllmConfig, options: LookaheadOptions) -> Iterator[str]:
    """What is refused in `config`, a sentence each: what was given, why, and what to write."""
    for why, applies in _of_the_model(config).items():
        if applies:
            yield f"model {config.model_config.model!r} {why}; {LEAVE_OUT}"
    for sentence, is_given in _others(config, options).items():
        if is_given:
            yield sentence
    asked = {
        "": True,
        "a hybrid model": config.model_config.is_hybrid,
        "drafter": options.drafter is not None,
        "parallel": options.parallel > 1,
    }
    for what, settings in SETTINGS.items():
        for path, why in settings.items() if asked[what] else ():
            value = attrgetter(path)(config)
            if value and (value is True or value != 1):
                given = path.rpartition(".")[2]
                given += f"={value!r}" if isinstance(value, str | int) else ""
                if what:
                    yield f"{what} was given with {given}, but {why}; leave one of them out"
                else:
                    yield f"{given} was given, but {why}; leave it out, or {LEAVE_OUT}"


def _others(config: VllmConfig, options: LookaheadOptions) -> dict[str, object]:
    """Sentences about settings that are not in the table, and whether they apply."""
    from vllm import envs

    from lookahead_vllm.verify import native

    model, parallel = config.model_config, config.parallel_config
    executor, worker = parallel.distributed_executor_backend, parallel.worker_cls
    speculation = config.speculative_config
    is_compiled_by_ray = os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND") == "0"
    has_drafter, is_replicated = options.drafter is not None, options.parallel > 1
    on_cpu = config.device_config.device_type == "cpu"
    drafter_with, leave_one_out = "drafter was given with", "leave one of them out"
    return {
        "VLLM_USE_RUST_FRONTEND=1 is set, but only vLLM's Python front-end passes lookahead's "
        f"namespaces and request options on; unset it, or {LEAVE_OUT}": envs.VLLM_USE_RUST_FRONTEND,
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is set, but lookahead does not run in a compiled graph "
        "of Ray; unset it": executor == "ray" and is_compiled_by_ray,
        "this engine would run vLLM's first model runner, on which lookahead does not run; unset "
        "VLLM_USE_V2_MODEL_RUNNER, and leave out what Model Runner V2 does not support, which vLLM "
        f"logs; or {LEAVE_OUT}": not config.use_v2_model_runner,
        f"distributed_executor_backend={executor!r} was given, under which every rank schedules by "
        f"itself, but all ranks verify the drafts of one; write 'mp' or 'ray', or {LEAVE_OUT}": (
            executor == "external_launcher" and parallel.world_size > 1
        ),
        f"worker_cls={worker!r} was given, but lookahead brings its own worker for "
        f"{' and '.join(WORKERS)}; write worker_cls='auto'": worker not in WORKERS,
        f"attention={options.attention!r} was given, but it is a choice for GPUs; leave it out": (
            on_cpu and options.attention != "auto"
        ),
        "use_fp64_gumbel was given, but on a CPU lookahead draws in float32; leave it out, or "
        f"{LEAVE_OUT}": on_cpu and model.use_fp64_gumbel,
        f"model {model.model!r} was given with dtype='float16', but on a CPU its recurrent layers "
        f"need float32 or bfloat16; write dtype='bfloat16', or {LEAVE_OUT}": (
            on_cpu and model.is_hybrid and str(model.dtype) == "torch.float16"
        ),
        f"{native.NO_COMPILER}, or {LEAVE_OUT}": on_cpu and native.find_compiler() is None,
        f"model {speculation.model!r} is a draft model, for which vLLM chooses the method "
        f"{speculation.method!r} and serves {model.model!r}; write that model instead, or "
        f"{LEAVE_OUT}": not has_drafter and speculation.method != SPECULATION["method"],
        f"{drafter_with} method {speculation.method!r}, but lookahead's trees hold the drafts of "
        f"{', '.join(DRAFTERS)}; {leave_one_out}": (
            has_drafter and speculation.method not in DRAFTERS
        ),
        f"{drafter_with} draft_sample_method='probabilistic', but in a tree its likeliest tokens "
        f"are verified; {leave_one_out}": (
            has_drafter and speculation.draft_sample_method == "probabilistic"
        ),
        f"{drafter_with} a model of several MTP modules, whose inputs vLLM prepares in another way "
        f"than those of one; {leave_one_out}": has_drafter and speculation.use_multi_module_mtp(),
        f"{drafter_with} parallel={options.parallel}, but replicas do not share a drafter's states"
        f"; {leave_one_out}": has_drafter and is_replicated,
        f"parallel was given with distributed_executor_backend={executor!r}, but vLLM's executor "
        f"'mp' starts replicas; {leave_one_out}": is_replicated and executor not in ("uni", "mp"),
    }


def _of_the_model(config: VllmConfig) -> dict[str, bool]:
    """Why a model is refused, and whether it is this one."""
    model, architecture = config.model_config, config.model_config.hf_text_config
    return {
        "has only recurrent layers, and vLLM passes the number of accepted drafts only to models "
        "that also have attention": model.is_attention_free,
        "has Mamba 1 layers, whose state vLLM does not roll back when a draft is rejected": (
            architecture.model_type in MAMBA_1_HYBRIDS
        ),
        "embeds n-grams of the rows before a row, which are not the path to a node": (
            getattr(architecture, "ngram_vocab_size_ratio", None) is not None
        ),
        "attends in both directions to the tokens of a step, so a draft would change its own "
        "verification": architecture.model_type == "hrm_text",
        f"with runner={model.runner_type!r} generates no text to look ahead in": (
            model.runner_type != "generate"
        ),
    }
