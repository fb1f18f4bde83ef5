"""Reads lookahead's options from vLLM's engine arguments."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lookahead_vllm.draft.allowed import check_names
from lookahead_vllm.draft.options import LookaheadOptions, OptionError
from lookahead_vllm.draft.registry import PROPOSERS

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

KEY = "lookahead"
"""The speculative method, and the key of our options in a request's `extra_args`."""

PACKAGE = "lookahead_vllm."
CLASSES = {path.rpartition(".")[2]: name for name, path in PROPOSERS.items()}
"""Names of proposers by their classes, as vLLM's method custom_class wants them."""

FLAGS = {
    "method": ("spec_method", "--spec-method"),
    "model": ("spec_model", "--speculative-model"),
    "num_speculative_tokens": ("spec_tokens", "--num-speculative-tokens"),
}
"""Keys of `speculative_config` that are also fields of `EngineArgs`, with their flags."""

MISSPELLED = (
    "speculative method or model {!r} was given, which vLLM does not know; write 'lookahead'"
)


def requests_lookahead(args: Any) -> bool:
    """Whether these engine arguments, of any release of vLLM, request lookahead."""
    return any(is_lookahead(name) or _is_class(name) for name in _names(args))


def misspelled_name(args: Any) -> str | None:
    """What is probably meant to be "lookahead" in engine arguments that vLLM refused, or None."""
    return next((name for name in _names(args) if is_misspelled(name)), None)


def is_misspelled(name: Any) -> bool:
    """Whether a method or a model that vLLM does not know is probably meant to be "lookahead"."""
    if not isinstance(name, str) or len(name) > 60 or "/" in name or os.path.exists(name):
        return False
    letters = "".join(filter(str.isalpha, name)).lower()
    return KEY in letters or bool(get_close_matches(letters, [KEY], cutoff=0.8))


def _names(args: Any) -> list[Any]:
    """What engine arguments, of any release of vLLM, say about speculation."""
    given = getattr(args, "speculative_config", None)
    fields_of_args = ("spec_method", "spec_model", "speculative_model")
    names = [getattr(args, name, None) for name in fields_of_args]
    return [*names, *(given.values() if isinstance(given, Mapping) else [given])]


def is_lookahead(name: Any) -> bool:
    """Whether a method or a model is lookahead's."""
    return name in (KEY, f"[{KEY}]")


def _is_class(model: Any) -> bool:
    return isinstance(model, str) and model.startswith(PACKAGE)


def requested_options(args: EngineArgs) -> LookaheadOptions:
    """The options in engine arguments that request lookahead.

    Raises
    ------
    OptionError
        One sentence: what was given, what is allowed, what to write.
    """
    given = args.speculative_config or {}
    if not isinstance(given, dict):
        raise OptionError(
            f"speculative_config={reprlib.repr(given)} was given, but it must be a dict; write for "
            'instance {"method": "lookahead"}'
        )
    check_names(given, ("method", "model", *(option.name for option in fields(LookaheadOptions))))
    flags = {key: getattr(args, attr) for key, (attr, _) in FLAGS.items()}
    flags = {key: value for key, value in flags.items() if value is not None}
    settings: dict[str, Any] = {**given, **flags}
    method, model = settings.pop("method", None), settings.pop("model", None)
    for key in given.keys() & flags.keys():
        raise OptionError(
            f"{key} was given twice, as {FLAGS[key][1]} {flags[key]} and in --speculative-config "
            f"as {given[key]!r}; write it once"
        )
    if not (method is None or is_lookahead(method) or method == "custom_class"):
        raise OptionError(
            f"method {method!r} was given together with model {model!r}; "
            'write only --speculative-config \'{"method": "lookahead"}\''
        )
    if _is_class(model):
        settings.setdefault("proposer", _proposer_of(model))
    elif not (model is None or is_lookahead(model)):
        raise OptionError(
            f"model {model!r} was given with method 'lookahead', which needs no draft model; "
            'write {"method": "lookahead"} without a model'
        )
    return LookaheadOptions.from_dict(settings)


def _proposer_of(model: str) -> str:
    """The proposer whose class is `model`."""
    name = model.removeprefix(PACKAGE)
    if name not in CLASSES:
        close = get_close_matches(name, CLASSES, n=1, cutoff=0.0)[0]
        raise OptionError(
            f"model {model!r} was given, but lookahead's classes are "
            f"{', '.join(PACKAGE + known for known in CLASSES)}; "
            f'write "{PACKAGE}{close}", or leave model out'
        )
    return CLASSES[name]
