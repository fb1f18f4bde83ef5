"""Makes vLLM's config for an engine with lookahead, or refuses what it cannot serve exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lookahead_vllm.engine import cpu_config
from lookahead_vllm.engine.engine_args import FLAGS
from lookahead_vllm.engine.refusals import SPECULATION, WORKERS, refusals
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.server import (
    AUTO_RECURRENT_LENGTH,
    AUTO_RECURRENT_LENGTH_OF_MANY,
    CHAIN_LENGTH,
    FEW_REQUESTS,
    LookaheadOptions,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

SCHEDULER = "lookahead_vllm.engine.scheduler.scheduler.LookaheadScheduler"
REPLICA_EXECUTOR = "lookahead_vllm.engine.replicas.executor.ReplicaExecutor"

_OPTIONS = "lookahead_options"
"""Attribute of vLLM's speculative config in an engine with lookahead. vLLM finds what it has
compiled by a hash of the fields of its configs: those hold all that our options change of it."""


def make_config(
    args: EngineArgs, options: LookaheadOptions, create: Callable[[], VllmConfig]
) -> VllmConfig:
    """The engine's config with `options`; `create` makes vLLM's from `args`.

    Raises
    ------
    OptionError
        The config contains something that lookahead cannot serve exactly.
    """
    fields = vars(args)
    given = dict(fields)
    about_drafts = ("speculative_config", *(name for name, _ in FLAGS.values()))

    def make(speculative: dict[str, Any] | None) -> VllmConfig:
        # vLLM writes into its arguments, and would read what it wrote as given: a data-parallel
        # rank, for instance, as external load balancing.
        fields.clear()
        fields.update(given | dict.fromkeys(about_drafts) | {about_drafts[0]: speculative})
        try:
            return cpu_config.make(create)
        finally:
            fields.update({name: given[name] for name in about_drafts})

    asked = options
    if args.enable_lora:
        # vLLM requires that the drafts of all requests fit into the tokens of a step.
        scheduler = make(None).scheduler_config
        options = asked.at_most(scheduler.max_num_batched_tokens // scheduler.max_num_seqs - 1)
    config = make(_speculation(options))
    if config.model_config.is_hybrid:
        is_small = config.scheduler_config.max_num_seqs <= FEW_REQUESTS
        most = AUTO_RECURRENT_LENGTH if is_small else AUTO_RECURRENT_LENGTH_OF_MANY
        shorter = asked.at_most(min(most, options.decoding_length))
        if shorter != options:
            config, options = make(_speculation(shorter)), shorter
    apply(config, options)
    return config


def _speculation(options: LookaheadOptions) -> dict[str, Any]:
    """A speculative config that vLLM accepts: the trained drafter's, or `SPECULATION`."""
    if options.drafter is not None:
        return dict(options.drafter)
    return {**SPECULATION, "num_speculative_tokens": options.decoding_length}


def apply(config: VllmConfig, options: LookaheadOptions) -> None:
    """Write `options`, our worker and our scheduler into `config`.

    Raises
    ------
    OptionError
        The config contains something that lookahead cannot serve exactly.
    """
    from vllm.logger import init_logger

    for sentence in refusals(config, options):
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
    init_logger(f"vllm.{__name__}").info_once(
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
