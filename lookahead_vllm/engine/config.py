"""Makes vLLM's config for an engine with lookahead, or refuses what it cannot serve exactly."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lookahead_vllm.draft.options import (
    AUTO_RECURRENT_LENGTH,
    AUTO_RECURRENT_LENGTH_OF_MANY,
    CHAIN_LENGTH,
    FEW_REQUESTS,
    LookaheadOptions,
    OptionError,
)
from lookahead_vllm.engine import cpu_runner
from lookahead_vllm.engine.requested import FLAGS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": (
        "lookahead_vllm.engine.model_runner.cpu_worker.LookaheadCPUWorker"
    ),
    "vllm.v1.worker.gpu_worker.Worker": (
        "lookahead_vllm.engine.model_runner.gpu_worker.LookaheadGPUWorker"
    ),
}
"""Our worker by vLLM's."""

SCHEDULER = "lookahead_vllm.engine.scheduler.scheduler.LookaheadScheduler"
REPLICA_EXECUTOR = "lookahead_vllm.engine.scheduler.replica_executor.ReplicaExecutor"

_LEAVE_OUT = "leave lookahead out of the speculative config"

DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's methods whose drafters lookahead's trees may hold; "mtp" stands for all kinds of MTP."""

_OPTIONS = "lookahead_options"
"""Attribute of vLLM's speculative config in an engine with lookahead. vLLM finds what it has
compiled by a hash of the fields of its configs: those hold all that our options change of it."""

MAMBA_1_HYBRIDS = ("jamba",)
"""Types of models with attention and Mamba 1 layers."""


SPECULATION = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
"""What vLLM takes lookahead for: the only method without a draft model that it combines with
asynchronous scheduling."""


def make_config(
    args: EngineArgs, options: LookaheadOptions, create: Callable[[], VllmConfig]
) -> VllmConfig:
    """The engine's config with `options`.

    Parameters
    ----------
    create
        Makes vLLM's config from `args`.

    Raises
    ------
    OptionError
        The config contains something that lookahead cannot serve exactly.
    """
    make = _Maker(args, functools.partial(cpu_runner.make, create))
    asked = options
    if args.enable_lora:
        options = _within_lora_rows(make, asked)
    config = make(options)
    if config.model_config.is_hybrid:
        is_small = config.scheduler_config.max_num_seqs <= FEW_REQUESTS
        most = AUTO_RECURRENT_LENGTH if is_small else AUTO_RECURRENT_LENGTH_OF_MANY
        shorter = asked.at_most(min(most, options.decoding_length))
        if shorter != options:
            config, options = make(shorter), shorter
    apply(config, options)
    return config


class _Maker:
    """Makes vLLM's config several times, each time from the arguments as they were given.

    vLLM writes into its arguments, and would read what it wrote as given: a data-parallel rank, for
    instance, as external load balancing.
    """

    def __init__(self, args: EngineArgs, create: Callable[[], VllmConfig]) -> None:
        self._args, self._create = args, create
        self._given = dict(vars(args))

    def __call__(self, options: LookaheadOptions) -> VllmConfig:
        """With a speculative method that vLLM accepts: the trained drafter's, or `SPECULATION`."""
        if options.drafter is not None:
            return self._make(dict(options.drafter))
        tokens = {"num_speculative_tokens": options.decoding_length}
        return self._make({**SPECULATION, **tokens})

    def plain(self) -> VllmConfig:
        """Plain vLLM's, without speculation."""
        return self._make(None)

    def _make(self, speculative: dict[str, Any] | None) -> VllmConfig:
        speculation = ("speculative_config", *(attr for attr, _ in FLAGS.values()))
        fields = vars(self._args)
        fields.clear()
        fields.update(self._given, **dict.fromkeys(speculation))
        fields["speculative_config"] = speculative
        try:
            return self._create()
        finally:
            fields.update({name: self._given[name] for name in speculation})


def _within_lora_rows(make: _Maker, options: LookaheadOptions) -> LookaheadOptions:
    """Limit the nodes so that the drafts of max_num_seqs requests fit into max_num_batched_tokens;
    vLLM requires this with LoRA."""
    scheduler = make.plain().scheduler_config
    return options.at_most(scheduler.max_num_batched_tokens // scheduler.max_num_seqs - 1)


def _inform(sentence: str) -> None:
    """Log `sentence` once."""
    from vllm.logger import init_logger

    init_logger(f"vllm.{__name__}").info_once(sentence)


def _refusals(config: VllmConfig, options: LookaheadOptions) -> dict[str, bool]:
    """What lookahead does not serve exactly, in a sentence each, and whether `config` has it."""
    tables = [_of_settings(config), _of_models(config), _of_the_runner(config, options)]
    if options.drafter is None:
        tables.append(_of_the_method(config))
    else:
        tables.append(_beside_a_drafter(config, options))
    if options.parallel > 1:
        tables.append(_beside_replicas(config))
    return {sentence: applies for table in tables for sentence, applies in table.items()}


def _of_settings(config: VllmConfig) -> dict[str, bool]:
    parallel = config.parallel_config
    executor, worker = parallel.distributed_executor_backend, parallel.worker_cls
    scheduler = config.scheduler_config.scheduler_cls
    is_compiled_by_ray = os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND") == "0"
    return {
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is set, but lookahead does not run in a compiled graph "
        "of Ray; unset it": executor == "ray" and is_compiled_by_ray,
        f"distributed_executor_backend={executor!r} was given, under which every rank schedules by "
        "itself, but lookahead's ranks share the drafts of one rank; write 'mp' or 'ray', or "
        f"{_LEAVE_OUT}": executor == "external_launcher" and parallel.world_size > 1,
        f"worker_cls={worker!r} was given, but lookahead brings its own worker for "
        f"{' and '.join(WORKERS)}; write worker_cls='auto'": worker not in WORKERS,
        f"scheduler_cls={scheduler!r} was given, but lookahead brings its own scheduler; leave "
        "scheduler_cls out": scheduler is not None,
    }


def _of_the_method(config: VllmConfig) -> dict[str, bool]:
    speculation, model = config.speculative_config, config.model_config.model
    return {
        f"model {speculation.model!r} is a draft model, for which vLLM chooses the method "
        f"{speculation.method!r} and serves {model!r}; write that model instead, or {_LEAVE_OUT}": (
            speculation.method != SPECULATION["method"]
        ),
    }


def _beside_a_drafter(config: VllmConfig, options: LookaheadOptions) -> dict[str, bool]:
    speculation = config.speculative_config
    stages = config.parallel_config.pipeline_parallel_size
    reasons = {
        f"method {speculation.method!r}, but lookahead's trees hold the drafts of "
        f"{', '.join(DRAFTERS)}": speculation.method not in DRAFTERS,
        "parallel_drafting, but a chain is drafted token by token": speculation.parallel_drafting,
        "draft_sample_method='probabilistic', but in a tree its likeliest tokens are verified": (
            speculation.draft_sample_method == "probabilistic"
        ),
        "enable_adaptive_verification, but lookahead's budget decides what is verified": (
            speculation.enable_adaptive_verification
        ),
        "use_local_argmax_reduction, which hides how likely its tokens are": (
            speculation.use_local_argmax_reduction
        ),
        "num_speculative_tokens_per_batch_size, but lookahead's budget follows the batch": (
            speculation.num_speculative_tokens_per_batch_size is not None
        ),
        f"parallel={options.parallel}, but replicas do not share a drafter's states": (
            options.parallel > 1
        ),
        f"pipeline_parallel_size={stages}, but the drafter is on the last stage": stages > 1,
    }
    return {
        f"drafter was given with {reason}; leave one of them out": bool(applies)
        for reason, applies in reasons.items()
    }


def _of_models(config: VllmConfig) -> dict[str, bool]:
    model, architecture = config.model_config, config.model_config.hf_text_config
    reasons = {
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
    return {
        f"model {model.model!r} {reason}; {_LEAVE_OUT}": applies
        for reason, applies in reasons.items()
    } | {
        "use_replayssm was given, with which recurrent layers keep no state for a node; leave it "
        f"out, or {_LEAVE_OUT}": model.is_hybrid and config.cache_config.use_replayssm,
    }


def _of_the_runner(config: VllmConfig, options: LookaheadOptions) -> dict[str, bool]:
    reasons = {
        f"attention={options.attention!r} was given, but it is a choice for GPUs": (
            config.device_config.device_type == "cpu" and options.attention != "auto"
        ),
        "enable_batch_sharded_sampling was given, with which no rank has the logits of all nodes": (
            bool(config.parallel_config.enable_batch_sharded_sampling)
        ),
        "a watermark was requested, which lookahead does not verify at the nodes of a tree": (
            config.watermark_config is not None
        ),
        "return_sampling_mask was given, which lookahead supports only for one token a step": (
            config.model_config.return_sampling_mask
        ),
        "enable_trace_replay was given, which dictates the tokens that lookahead would verify": (
            config.model_config.enable_trace_replay
        ),
    }
    return {
        "this engine would run vLLM's first model runner, on which lookahead does not run; unset "
        "VLLM_USE_V2_MODEL_RUNNER, and leave out what Model Runner V2 does not support, which vLLM "
        f"logs; or {_LEAVE_OUT}": not config.use_v2_model_runner
    } | {f"{reason}; leave it out, or {_LEAVE_OUT}": given for reason, given in reasons.items()}


def _beside_replicas(config: VllmConfig) -> dict[str, bool]:
    parallel = config.parallel_config
    executor, stages = parallel.distributed_executor_backend, parallel.pipeline_parallel_size
    engines, machines = parallel.data_parallel_size, parallel.nnodes
    contexts = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    reasons = {
        f"distributed_executor_backend={executor!r}, but vLLM's executor 'mp' starts replicas": (
            executor not in ("uni", "mp")
        ),
        f"nnodes={machines}, but replicas are started on one machine": machines > 1,
        f"pipeline_parallel_size={stages}, but a replica has one stage": stages > 1,
        f"data_parallel_size={engines}, but replicas of several engines cannot be told apart": (
            engines > 1
        ),
        "context parallelism, under which drafts are chains, which cannot be shared": (
            max(contexts) > 1
        ),
        f"model {config.model_config.model!r}, whose recurrent states replicas do not exchange": (
            config.model_config.is_hybrid
        ),
        "kv_transfer_config, but each replica has all KV, and vLLM would transfer parts of it": (
            config.kv_transfer_config is not None
        ),
    }
    return {
        f"parallel was given with {reason}; leave one of them out": applies
        for reason, applies in reasons.items()
    }


def apply(config: VllmConfig, options: LookaheadOptions) -> None:
    """Write `options`, our worker and our scheduler into `config`.

    Raises
    ------
    OptionError
        The config contains something that lookahead cannot serve exactly.
    """
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND:
        raise OptionError(
            "VLLM_USE_RUST_FRONTEND=1 is set, but only vLLM's Python front-end passes lookahead's "
            f"namespaces and request options on; unset it, or {_LEAVE_OUT}"
        )
    for sentence, applies in _refusals(config, options).items():
        if applies:
            raise OptionError(sentence)
    _check_fleet(options)
    options = options.with_checked_cache().for_model(_num_parameters(config.model_config))
    speculation = config.speculative_config
    if options.drafter is not None:
        # vLLM has one number for both: from here on it is that of the nodes.
        length = {CHAIN_LENGTH: speculation.num_speculative_tokens}
        options = replace(options, drafter={**options.drafter, **length})
        speculation.num_speculative_tokens = options.decoding_length
    setattr(speculation, _OPTIONS, options)
    config.scheduler_config.scheduler_cls = SCHEDULER
    config.parallel_config.worker_cls = WORKERS[config.parallel_config.worker_cls]
    if options.parallel > 1:
        config.parallel_config.distributed_executor_backend = REPLICA_EXECUTOR
    _inform(
        "Lookahead: vLLM's warnings about a custom scheduler class and max_num_scheduled_tokens "
        "are no faults."
    )


def _check_fleet(options: LookaheadOptions) -> None:
    """Raise OptionError if the server of `share_with` cannot be reached with this URL."""
    if options.share_with is None:
        return
    if find_spec("redis") is None:
        raise OptionError(
            "share_with was given, but the package redis is not installed; install "
            "lookahead-vllm[fleet]"
        )
    from redis.connection import parse_url

    try:
        parse_url(options.share_with)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise OptionError(
            f"share_with was given, but its URL is wrong: {error}; write for instance "
            "redis://localhost:6379/0"
        ) from None


def _num_parameters(model_config: ModelConfig) -> float:
    """Approximate parameter count of a dense model: 12 hidden² per layer, plus the embedding."""
    hidden = model_config.get_hidden_size()
    layers = model_config.get_total_num_hidden_layers()
    return 12.0 * layers * hidden**2 + float(model_config.get_vocab_size() * hidden)


def options_of(config: VllmConfig) -> LookaheadOptions:
    """The options that `apply` wrote."""
    options: LookaheadOptions = getattr(config.speculative_config, _OPTIONS)
    return options


def is_marked(speculative_config: Any) -> bool:
    """Whether `apply` prepared this speculative config of vLLM's."""
    return hasattr(speculative_config, _OPTIONS)


def is_lookahead(config: VllmConfig) -> bool:
    """Whether `apply` wrote options into this config."""
    return is_marked(config.speculative_config)
