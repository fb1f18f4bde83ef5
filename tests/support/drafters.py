"""Tiny trained drafters, with the weights of `models.WANDERING`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tests.support.models import NOISY, TINY, save_config

_LLAMA, _QWEN2 = TINY["llama"], TINY["qwen2"]
_HEAD = {**_LLAMA, "num_hidden_layers": 1, "model_type": "llama"}

_CONFIGS = {
    **TINY,
    f"{NOISY}llama": {**_LLAMA, "model_type": "llama"},
    "eagle": _HEAD,
    "eagle3": {
        **_HEAD,
        "architecture": "LlamaForCausalLMEagle3",
        "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "num_aux_hidden_states": 3,
    },
    "mimo": {
        **_QWEN2,
        "architecture": "MiMoForCausalLM",
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    },
}

DRAFTERS = {
    "draft_model": ("llama", f"{NOISY}llama"),
    "eagle": ("llama", "eagle"),
    "eagle3": ("llama", "eagle3"),
    "mtp": ("mimo", None),
}
"""By vLLM's method: a target, and the model that drafts for it."""


class Drafted(NamedTuple):
    """A target and its drafter."""

    target: Path
    drafter: dict[str, Any]
    """Lookahead's option."""


def save_drafter(method: str, folder: Path, length: int = 4) -> Drafted:
    """Write a target and a drafter that proposes `length` tokens, one of DRAFTERS."""
    target, model = DRAFTERS[method]
    drafter: dict[str, Any] = {"method": method, "num_speculative_tokens": length}
    if model is not None:
        drafter["model"] = str(save_config(model, folder, _CONFIGS))
    return Drafted(save_config(target, folder, _CONFIGS), drafter)
