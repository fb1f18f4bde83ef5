"""The time of a step by part, read from the process in which the engine's worker runs."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from benchmarks.engines.stopwatch import Stopwatch

Seconds = dict[str, float]
"""Wall time by part of a step.

`step` is lookahead's own whole step. `decode` is the time of the decode steps that follow each
other, from one launch to the next, `decode_steps` is their number, and `model` is the time that
the model took in them; all methods have these three on a CPU.
"""

PARTS = {
    "draft": "drafting",
    "attention": "tree attention",
    "verify": "acceptance and sampling",
    "compaction": "KV moves",
}

SENDING_FUNCTIONS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""With this in its environment, vLLM sends functions to its worker."""

ENVIRONMENT = {"LOOKAHEAD_VLLM_PROFILE": "1", **SENDING_FUNCTIONS}


_decode_seconds: Seconds = {}
"""What `DecodeClock` has measured in this process, a worker."""


class DecodeClock:
    """Times decode steps and the model in them, in `seconds`.

    A step with prompts, and the step before it, do not count: prompts are long, and between two
    requests the engine waits for its front end.
    """

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        self.model = Stopwatch()
        self._last: float | None = None

    def begin_step(self, scheduler_output: Any) -> None:
        """Take the launch of a step, vLLM's `SchedulerOutput`."""
        if not scheduler_output.num_scheduled_tokens:
            return
        now = time.perf_counter()
        drafts = scheduler_output.scheduled_spec_decode_tokens
        decodes = not scheduler_output.scheduled_new_reqs and all(
            count == 1 + len(drafts.get(request, ()))
            for request, count in scheduler_output.num_scheduled_tokens.items()
        )
        if decodes and self._last is not None:
            figures = {"decode": now - self._last, "model": self.model.seconds, "decode_steps": 1.0}
            for part, value in figures.items():
                self._seconds[part] = self._seconds.get(part, 0.0) + value
        self._last = now if decodes else None
        self.model.seconds = 0.0


def measure(llm: Any) -> None:
    """Time the decode steps of an engine on a CPU from now on; nothing if profiling is off."""
    if os.environ.get("LOOKAHEAD_VLLM_PROFILE") == "1":
        llm.collective_rpc(_measure)


def _measure(worker: Any) -> None:
    """Runs in a worker. A GPU works behind the host, so there these times would mean nothing."""
    runner = worker.model_runner
    if runner.device.type != "cpu":
        return
    clock = DecodeClock(_decode_seconds)
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        clock.begin_step(scheduler_output)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    runner.model.forward = clock.model.timing(runner.model.forward)
    runner.model.compute_logits = clock.model.timing(runner.model.compute_logits)


def profiled_seconds(llm: Any) -> Seconds:
    """The first worker's times so far; empty if profiling is off."""
    if os.environ.get("LOOKAHEAD_VLLM_PROFILE") != "1":
        return {}
    return dict(llm.collective_rpc(_read)[0])


def _read(worker: Any) -> Seconds:
    try:
        from lookahead_vllm.engine.worker import step_recorder
    except ImportError:
        return dict(_decode_seconds)
    return {**step_recorder.seconds, **_decode_seconds}


class DecodeStep(NamedTuple):
    """The mean decode step: wall time and the model's part of it, in seconds."""

    seconds: float
    model: float

    @property
    def outside(self) -> float:
        """The share of the step that is not the model's, in [0, 1]."""
        return 1 - self.model / self.seconds


def decode_step(seconds: Seconds) -> DecodeStep | None:
    """The mean decode step; None where none was measured."""
    count = seconds.get("decode_steps", 0.0)
    if not count:
        return None
    return DecodeStep(seconds["decode"] / count, seconds["model"] / count)


def shares(seconds: Seconds) -> dict[str, float]:
    """The share of each part in a step, in [0, 1], and of the `rest`.

    Empty without any step, as for a method that is not profiled.
    """
    step = seconds.get("step", 0.0)
    if step <= 0:
        return {}
    parts = {title: seconds.get(part, 0.0) / step for part, title in PARTS.items()}
    return {**parts, "rest": 1 - sum(parts.values())}
