"""The methods that can be compared: a name, and the `speculative_config` that vLLM gets."""

import json
from collections.abc import Sequence
from typing import Any

SpeculativeConfig = dict[str, Any]

BASELINE = "none"

KNOWN: dict[str, SpeculativeConfig | None] = {
    BASELINE: None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    },
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
}


class MethodError(ValueError):
    """The methods given cannot be run; the message says what to write instead."""


def choose_methods(names: str, configs: Sequence[str]) -> dict[str, SpeculativeConfig | None]:
    """The methods to run, in order: those of `names`, as in `none,ngram,lookahead`, and `configs`.

    The latter are further methods, each `NAME=JSON`. They run after `names`, or at their place in
    `names`. MethodError if a name is unknown, already taken or given twice, or a configuration is
    neither a JSON object nor null (plain vLLM).
    """
    known = dict(KNOWN)
    for text in configs:
        name, config = _parse_config(text)
        if name in known:
            raise MethodError(f"--config: the name {name!r} is taken; choose another")
        known[name] = config
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise MethodError(
                f"--methods: there is no method {name!r}; there are {', '.join(known)} "
                "(--config NAME=JSON adds others)"
            )
        if chosen.count(name) > 1:
            raise MethodError(f"--methods: {name!r} is given twice")
    chosen += [name for name in known if name not in KNOWN and name not in chosen]
    if not chosen:
        raise MethodError(f"--methods: name at least one of {', '.join(known)}")
    return {name: known[name] for name in chosen}


def _parse_config(text: str) -> tuple[str, SpeculativeConfig | None]:
    name, separator, value = text.partition("=")
    example = (
        """write for example --config 'ngram4={"method":"ngram","num_speculative_tokens":4}'"""
    )
    if not separator or not name.strip() or "," in name:
        raise MethodError(f"--config: {text!r} is not NAME=JSON; {example}")
    try:
        config = json.loads(value)
    except json.JSONDecodeError as error:
        raise MethodError(f"--config {name}: not JSON ({error}); {example}") from None
    if config is not None and not isinstance(config, dict):
        raise MethodError(f"--config {name}: a JSON object is expected; {example}")
    return name.strip(), config
