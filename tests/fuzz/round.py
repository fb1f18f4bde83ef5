"""One round of the fuzzer: two engines, and the requests to both."""

from dataclasses import dataclass, field
from typing import Any

from lookahead_vllm.draft.tree import UNKNOWN

TWO_STAGES = "two pipeline stages"
TWO_REPLICAS = "two replicas"


@dataclass
class Request:
    """One request; `params` are keyword arguments of `SamplingParams`."""

    prompt: list[int]
    params: dict[str, Any]
    structured: dict[str, Any] | None = None
    adapter: int | None = None
    priority: int = 0
    arrival: int = 0
    """It is sent before this step of the engine."""
    abort_after: int | None = None
    aborts_within_step: bool = False
    """An engine core in this process hears of the abort after the next step's launch."""
    streamed: bool = False
    features: set[str] = field(default_factory=set)
    namespace: str | None = None
    salt: str | None = None
    references: list[list[int] | int] = field(default_factory=list)
    """Each is token ids, or the index of a request whose answer it is."""
    spellings: list[list[int]] = field(default_factory=list)
    """Tool results in another spelling, as token ids."""
    embedded: list[bool] | None = None
    """By prompt token: whether it is sent as an embedding."""
    noise: int | None = None
    """The seed of random embeddings; without it, they are those of the prompt's tokens."""
    turns: list[list[int]] = field(default_factory=list)
    """Of a streaming session: the inputs after the prompt, one after each answer."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """By such an input: the parameters that it changes."""
    hurry_after: int | None = None
    """Once an answer has so many tokens, all other inputs of a session are sent, and its end; if
    None, each is sent when the answer before it has ended."""

    @property
    def known_prompt(self) -> list[int]:
        """The prompt with UNKNOWN for embeddings; empty if it has no token ids."""
        if self.embedded is None:
            return self.prompt
        if all(self.embedded):
            return []
        return [UNKNOWN if e else t for t, e in zip(self.prompt, self.embedded, strict=True)]


@dataclass
class Round:
    """A model, the settings of two engines that run it, and the requests to both."""

    model: str
    settings: dict[str, Any]
    """Engine arguments of both engines."""
    stress: dict[str, Any]
    """Further arguments of the lookahead engine; they must not change its output."""
    lookahead: dict[str, Any]
    """The speculative config."""
    requests: list[Request]
    features: set[str]
    drafter: str = ""
    """vLLM's method of a trained drafter, one of `tests.support.drafters.DRAFTERS`; "" for none."""
    processes: str = ""
    """What has a process of its own in the lookahead engine: nothing if "", else "engine and
    worker", TWO_STAGES or TWO_REPLICAS."""
    interruption: str = ""
    """What the lookahead engine is told while it runs, one of `play.INTERRUPTIONS`, or ""."""
    interrupt_every: int = 1
    """It is told so after every so many steps."""
    fleet: bool = False
    """The requests are sent to one lookahead engine, and then to another one that starts with what
    the first has shared."""
