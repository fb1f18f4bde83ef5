"""Reads lookahead's options from vLLM's engine arguments."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lookahead_vllm.options.allowed import OptionError, check_name
from lookahead_vllm.options.server import ALLOWED, KEY, LookaheadOptions

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

OURS = (KEY, f"[{KEY}]")
"""Lookahead as a method or a model."""

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
    return any(name in OURS for name in _names(args))


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
    for name in given:
        check_name(name, ("method", "model", *ALLOWED))
    settings: dict[str, Any] = dict(given)
    for key, (attribute, flag) in FLAGS.items():
        if (value := getattr(args, attribute)) is None:
            continue
        if key in given:
            raise OptionError(
                f"{key} was given twice, as {flag} {value} and in --speculative-config as "
                f"{given[key]!r}; write it once"
            )
        settings[key] = value
    method, model = settings.pop("method", None), settings.pop("model", None)
    if method not in (None, *OURS) or model not in (None, *OURS):
        raise OptionError(
            f"method {method!r} was given with model {model!r}, but lookahead is a method of its "
            'own and needs no draft model; write {"method": "lookahead"} without a model'
        )
    return LookaheadOptions.from_dict(settings)
