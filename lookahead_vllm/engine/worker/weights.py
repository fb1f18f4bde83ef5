"""Notices that the model gets other weights, as in reinforcement learning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def watch(model: Any, changed: Callable[[], None]) -> None:
    """Call `changed` whenever weights are loaded into the model from now on.

    vLLM's `reload_weights` and its weight transfer, verl, TRL and OpenRLHF call the model's
    `load_weights`, some of them once for each parameter.
    """
    load = getattr(model, "load_weights", None)
    if load is None:
        return

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        changed()
        return load(*args, **kwargs)

    model.load_weights = load_weights
