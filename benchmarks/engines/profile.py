"""The time of a step by part, read from the process in which the engine's worker runs."""

from __future__ import annotations

import os
from typing import Any

Seconds = dict[str, float]
"""Wall time by part of a step; `step` is the whole step."""

PARTS = {
    "draft": "drafting",
    "attention": "tree attention",
    "verify": "acceptance and sampling",
    "compaction": "KV moves",
}

SENDING_FUNCTIONS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""With this in its environment, vLLM sends functions to its worker."""

ENVIRONMENT = {"LOOKAHEAD_VLLM_PROFILE": "1", **SENDING_FUNCTIONS}


def profiled_seconds(llm: Any) -> Seconds:
    """The first worker's times so far; empty if profiling is off."""
    if os.environ.get("LOOKAHEAD_VLLM_PROFILE") != "1":
        return {}
    return dict(llm.collective_rpc(_read)[0])


def _read(worker: Any) -> Seconds:
    try:
        from lookahead_vllm.engine.worker import step_recorder
    except ImportError:
        return {}
    return dict(step_recorder.seconds)


def shares(seconds: Seconds) -> dict[str, float]:
    """The share of each part in a step, in [0, 1], and of the `rest`.

    Empty without any step, as for a method that is not profiled.
    """
    step = seconds.get("step", 0.0)
    if step <= 0:
        return {}
    parts = {title: seconds.get(part, 0.0) / step for part, title in PARTS.items()}
    return {**parts, "rest": 1 - sum(parts.values())}
