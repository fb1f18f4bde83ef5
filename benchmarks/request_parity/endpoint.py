"""An endpoint of vLLM's OpenAI server, and the values that are sent for its options."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLES = "benchmarks/request_parity/samples.py"


class SampleError(ValueError):
    """An option has no sample."""


@dataclass(frozen=True)
class Sample:
    """A value of one option. The samples of an option are sent concurrently.

    Attributes
    ----------
    value : Any
        What is sent.
    others : mapping
        Other options of the same request that the value needs.
    exact : bool
        False: sampled without a seed, so only status and shape are compared.
    setup : mapping or None
        A request that is sent before.
    """

    value: Any
    others: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    setup: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        names = [
            k if v and isinstance(v, (dict, list)) else f"{k}={_short(v, 24)}"
            for k, v in self.others.items()
        ]
        return _short(self.value) + (f" with {', '.join(names)}" if names else "")


@dataclass(frozen=True, eq=False)
class Endpoint:
    """One of the server's endpoints.

    Attributes
    ----------
    name : str
        Its path below /v1.
    method : str
        The attribute of the `openai` client that sends requests to it.
    protocol : str
        vLLM's request class, as module:class.
    base : mapping
        Options of every request; a sample overrides them.
    samples : mapping
        The samples of each option.
    """

    name: str
    method: str
    protocol: str
    base: Mapping[str, Any]
    samples: Mapping[str, list[Sample]]

    def fields(self) -> list[str]:
        """The options that vLLM's request class declares."""
        module, _, name = self.protocol.partition(":")
        return list(getattr(importlib.import_module(module), name).model_fields)

    def options(self) -> list[str]:
        """vLLM's options in its own order, then those that only OpenAI's documentation knows.

        Raises
        ------
        SampleError
            An option that vLLM declares has no sample.
        """
        fields = self.fields()
        for option in fields:
            if not self.samples.get(option):
                raise SampleError(
                    f"no sample for option {option} of endpoint {self.name}: add one to {SAMPLES}"
                )
        return [*fields, *(option for option in self.samples if option not in fields)]

    def body(self, option: str, sample: Sample, streamed: bool) -> dict[str, Any]:
        """The request's JSON."""
        stream = {"stream": True} if streamed else {}
        return {**self.base, **stream, **sample.others, option: sample.value}

    def stream_modes(self, option: str, sample: Sample) -> tuple[bool, ...]:
        """Whether to send it unstreamed (False), streamed (True), or both."""
        if option == "stream":
            return (bool(sample.value),)
        return (bool(sample.others["stream"]),) if "stream" in sample.others else (False, True)


def of(value: Any, /, **others: Any) -> Sample:
    """A sample that is compared exactly."""
    return Sample(value, others)


def unseeded(value: Any, /, **others: Any) -> Sample:
    """A sample of which only the shape is compared; `ignore_eos` fixes the answer's length."""
    return Sample(value, {**others, "ignore_eos": True}, exact=False)


def _short(value: Any, limit: int = 52) -> str:
    """The value as JSON; a long one is cut in the middle."""
    text, end = json.dumps(value, ensure_ascii=False), limit * 2 // 5
    return text if len(text) <= limit else f"{text[: limit - end - 1]}…{text[-end:]}"
