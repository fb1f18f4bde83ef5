"""Reads lookahead's options from vLLM's engine arguments, and writes them into its config."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from lookahead_vllm.draft.options import LookaheadOptions, OptionError
from lookahead_vllm.draft.registry import PROPOSERS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

KEY = "lookahead"
"""The key of our options in `VllmConfig.additional_config`."""

NAMES = ("lookahead", "[lookahead]")
PROPOSER_PATHS = {
    f"lookahead_vllm.{path.rpartition('.')[2]}": name for name, path in PROPOSERS.items()
}
DRAFTER_PATH = "lookahead_vllm.engine.worker.drafter.LookaheadDrafter"

_V1 = "lookahead_vllm.engine.worker.v1"
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{_V1}.cpu_worker.LookaheadCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": f"{_V1}.gpu_worker.LookaheadGPUWorker",
}
SCHEDULER = "lookahead_vllm.engine.scheduler.scheduler.LookaheadScheduler"

_FLAGS = {
    "method": ("spec_method", "--spec-method"),
    "model": ("spec_model", "--speculative-model"),
    "num_speculative_tokens": ("spec_tokens", "--num-speculative-tokens"),
}
"""Keys of `speculative_config` that are also fields of `EngineArgs`, with their flags."""


def asks(args: Any) -> bool:
    """Whether these engine arguments, of any release of vLLM, ask for lookahead."""
    given = getattr(args, "speculative_config", None)
    if isinstance(given, str):  # as in old releases
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    methods = [getattr(args, "spec_method", None), given]
    models = [getattr(args, name, None) for name in ("spec_model", "speculative_model")]
    if isinstance(given, Mapping):
        methods.append(given.get("method"))
        models.append(given.get("model"))
    return any(isinstance(method, str) and method in NAMES for method in methods) or any(
        isinstance(model, str) and model in (*NAMES, *PROPOSER_PATHS) for model in models
    )


def requested_options(args: EngineArgs) -> LookaheadOptions:
    """The options in engine arguments that ask for lookahead.

    Raises
    ------
    OptionError
        One sentence: what was given, what is allowed, what to write.
    """
    from vllm import envs

    given = args.speculative_config or {}
    if not isinstance(given, dict):
        raise OptionError(
            f"speculative_config={reprlib.repr(given)} was given, but it must be a dict; write for "
            'instance {"method": "lookahead"}'
        )
    given = {str(k).replace("-", "_"): v for k, v in given.items()}
    flags = {key: getattr(args, attr) for key, (attr, _) in _FLAGS.items()}
    flags = {key: value for key, value in flags.items() if value is not None}
    settings: dict[str, Any] = {**given, **flags}
    method, model = settings.pop("method", None), settings.pop("model", None)
    for key in given.keys() & flags.keys():
        raise OptionError(
            f"{key} was given twice, as {_FLAGS[key][1]} {flags[key]} and in --speculative-config "
            f"as {given[key]!r}; write it once"
        )
    if method is not None and method not in (*NAMES, "custom_class"):
        raise OptionError(
            f"method {method!r} was given together with model {model!r}; "
            'write --speculative-config \'{"method": "lookahead"}\' alone'
        )
    if model is not None and model not in (*NAMES, *PROPOSER_PATHS):
        raise OptionError(
            f"model {model!r} was given with method 'lookahead', which needs no draft model; "
            'write {"method": "lookahead"} without a model'
        )
    if model in PROPOSER_PATHS:
        settings.setdefault("proposer", PROPOSER_PATHS[model])
    if getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", None):
        raise OptionError(
            "VLLM_USE_V2_MODEL_RUNNER=1 is set, but only vLLM's first model runner verifies "
            "lookahead's trees, with the same output; unset it, or leave lookahead out of the "
            "speculative config"
        )
    return LookaheadOptions.from_dict(settings)


@contextmanager
def as_custom_class(args: EngineArgs, options: LookaheadOptions) -> Iterator[None]:
    """Make `args` ask for `custom_class`, vLLM's method for proposers of others, in the block."""
    fields = ("speculative_config", *(attr for attr, _ in _FLAGS.values()))
    saved = {field: getattr(args, field) for field in fields}
    for field in fields:
        setattr(args, field, None)
    args.speculative_config = {
        "method": "custom_class",
        "model": DRAFTER_PATH,
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    try:
        yield
    finally:
        for field, value in saved.items():
            setattr(args, field, value)


class _Refusal(NamedTuple):
    """An engine config that lookahead does not serve."""

    applies: Callable[[VllmConfig], bool]
    message: str
    """A template; `{config}` is the `VllmConfig`."""


_REFUSALS = (
    _Refusal(
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        "pipeline_parallel_size={config.parallel_config.pipeline_parallel_size} was given, but "
        "only the last stage knows which drafts were accepted, and all have to move their KV; "
        "write tensor_parallel_size instead, or leave lookahead out of the speculative config",
    ),
    _Refusal(
        lambda config: (
            config.parallel_config.distributed_executor_backend == "external_launcher"
            and config.parallel_config.world_size > 1
        ),
        "distributed_executor_backend='external_launcher' was given, under which every rank "
        "schedules for itself, but lookahead's ranks share what one of them drafts; write 'mp' "
        "or 'ray', or leave lookahead out of the speculative config",
    ),
    _Refusal(
        lambda config: config.parallel_config.worker_cls not in WORKERS,
        "worker_cls={config.parallel_config.worker_cls!r} was given, but lookahead brings its own "
        f"worker for {' and '.join(WORKERS)}; write worker_cls='auto'",
    ),
    _Refusal(
        lambda config: config.scheduler_config.scheduler_cls is not None,
        "scheduler_cls={config.scheduler_config.scheduler_cls!r} was given, but lookahead brings "
        "its own scheduler; leave scheduler_cls out",
    ),
    _Refusal(
        lambda config: config.model_config.is_hybrid or config.model_config.is_attention_free,
        "model {config.model_config.model!r} keeps recurrent state, which lookahead cannot roll "
        "back yet; leave lookahead out of the speculative config",
    ),
    _Refusal(
        lambda config: config.model_config.hf_text_config.model_type == "hrm_text",
        "model {config.model_config.model!r} attends in both directions to the tokens of a step, "
        "so a draft would change its own verification; leave lookahead out of the speculative "
        "config",
    ),
    _Refusal(
        lambda config: config.model_config.runner_type != "generate",
        "runner={config.model_config.runner_type!r} generates no text to look ahead in; leave "
        "lookahead out of the speculative config",
    ),
    _Refusal(
        lambda config: not isinstance(config.additional_config, dict),
        "additional_config is not a dict, so lookahead's options cannot be stored in it; write a "
        "JSON object",
    ),
)


def apply(config: VllmConfig, options: LookaheadOptions) -> None:
    """Write `options`, our worker and our scheduler into `config`.

    Raises
    ------
    OptionError
        The config asks for something that lookahead cannot serve exactly.
    """
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND:
        raise OptionError(
            "VLLM_USE_RUST_FRONTEND=1 is set, but only vLLM's Python front-end passes lookahead's "
            "namespaces and request options on; unset it, or leave lookahead out of the "
            "speculative config"
        )
    for refusal in _REFUSALS:
        if refusal.applies(config):
            raise OptionError(refusal.message.format_map({"config": config}))
    options = options.with_checked_cache().for_model(_num_parameters(config.model_config))
    config.scheduler_config.scheduler_cls = SCHEDULER
    config.parallel_config.worker_cls = WORKERS[config.parallel_config.worker_cls]
    config.additional_config = {**config.additional_config, KEY: options.to_dict()}


def _num_parameters(model_config: ModelConfig) -> float:
    """The approximate number of a dense model's: 12 matrices of [hidden, hidden] in each layer."""
    hidden = model_config.get_hidden_size()
    layers = model_config.get_total_num_hidden_layers()
    return 12.0 * layers * hidden**2 + float(model_config.get_vocab_size() * hidden)


def options_of(config: VllmConfig) -> LookaheadOptions:
    """The options that `apply` wrote."""
    return LookaheadOptions.from_dict(config.additional_config[KEY])


def is_lookahead(config: VllmConfig) -> bool:
    """Whether `apply` wrote options into this config."""
    return isinstance(config.additional_config, Mapping) and KEY in config.additional_config
