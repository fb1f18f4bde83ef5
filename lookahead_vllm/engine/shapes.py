"""What a draft is beside its tokens, which are all that vLLM carries to the scheduler."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The fields of a `DraftTree` that are not its tokens, as lists."""

    parents: list[int]
    probs: list[float]
    sources: list[int]


class Shapes(NamedTuple):
    """The shapes of a step's drafts."""

    by_request: dict[str, Shape]
    least_beside_prompt: float = 0.0
    """What a node's probability must be at least to pay in a step that reads a prompt too."""
    kept_blocks: dict[str, list[int]] = {}  # noqa: RUF012
    """Requests that gave KV blocks back, and how many each still has in each KV cache group."""


NONE = Shapes({})
_ATTRIBUTE = "lookahead_shapes"


def attach(carrier: Any, shapes: Shapes) -> None:
    """Send `shapes` along: with `DraftTokenIds` to the scheduler all drafts as they were proposed,
    with `SchedulerOutput` to the runner those that a grammar changed."""
    setattr(carrier, _ATTRIBUTE, shapes)


def attached(carrier: Any) -> Shapes:
    """What was sent along."""
    return getattr(carrier, _ATTRIBUTE, NONE)
