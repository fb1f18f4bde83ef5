"""From the ways in which a user can ask for lookahead to the config of one vLLM release."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lookahead_vllm.draft.options import LookaheadOptions, OptionError
from lookahead_vllm.draft.registry import PROPOSERS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

KEY = "lookahead"
"""Where our options ride in `VllmConfig.additional_config`."""

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

# Where vLLM keeps the same three settings a second time.
_FLAGS = {
    "method": ("spec_method", "--spec-method"),
    "model": ("spec_model", "--speculative-model"),
    "num_speculative_tokens": ("spec_tokens", "--num-speculative-tokens"),
}


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
    """The options of who asks for lookahead, under a release that fits.

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
    """Let `args` say `custom_class`, vLLM's open door, while the engine config is made."""
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


def apply(config: VllmConfig, options: LookaheadOptions) -> None:
    """Write `options` and our worker into `config`, or refuse with one sentence.

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
    parallel = config.parallel_config
    if (size := parallel.pipeline_parallel_size) > 1:
        raise OptionError(
            f"pipeline_parallel_size={size} was given, but only the last stage knows which drafts "
            "were accepted, and all have to move their KV; write tensor_parallel_size instead, or "
            "leave lookahead out of the speculative config"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise OptionError(
            "distributed_executor_backend='external_launcher' was given, under which every rank "
            "schedules for itself, but lookahead's ranks share what one of them drafts; write 'mp' "
            "or 'ray', or leave lookahead out of the speculative config"
        )
    if parallel.worker_cls not in WORKERS:
        raise OptionError(
            f"worker_cls={parallel.worker_cls!r} was given, but lookahead brings its own worker "
            f"for {' and '.join(WORKERS)}; write worker_cls='auto'"
        )
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is not None:
        raise OptionError(
            f"scheduler_cls={scheduler.scheduler_cls!r} was given, but lookahead brings its own "
            "scheduler; leave scheduler_cls out"
        )
    if config.model_config.is_hybrid or config.model_config.is_attention_free:
        raise OptionError(
            f"model {config.model_config.model!r} keeps recurrent state, which lookahead cannot "
            "roll back yet; leave lookahead out of the speculative config"
        )
    if config.model_config.hf_text_config.model_type == "hrm_text":
        raise OptionError(
            f"model {config.model_config.model!r} attends in both directions to the tokens of a "
            "step, so a draft would change its own verification; leave lookahead out of the "
            "speculative config"
        )
    if config.model_config.runner_type != "generate":
        raise OptionError(
            f"runner={config.model_config.runner_type!r} generates no text to look ahead in; "
            "leave lookahead out of the speculative config"
        )
    if not isinstance(config.additional_config, dict):
        raise OptionError(
            "additional_config is not a dict, so lookahead's options cannot ride in it; "
            "write a JSON object"
        )
    options = options.with_checked_cache().for_model(_num_parameters(config.model_config))
    scheduler.scheduler_cls = SCHEDULER
    parallel.worker_cls = WORKERS[parallel.worker_cls]
    config.additional_config = {**config.additional_config, KEY: options.to_dict()}


def _num_parameters(model_config: ModelConfig) -> float:
    """About so many, of a dense model of that shape: 12 matrices of hidden size a layer."""
    hidden = model_config.get_hidden_size()
    layers = model_config.get_total_num_hidden_layers()
    return 12.0 * layers * hidden**2 + float(model_config.get_vocab_size() * hidden)


def options_of(config: VllmConfig) -> LookaheadOptions:
    """Read back what `apply` wrote."""
    return LookaheadOptions.from_dict(config.additional_config[KEY])


def is_lookahead(config: VllmConfig) -> bool:
    """Whether this engine was asked to serve with lookahead."""
    return isinstance(config.additional_config, Mapping) and KEY in config.additional_config
