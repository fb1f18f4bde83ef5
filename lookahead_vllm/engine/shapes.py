"""Drafts on their way to the scheduler, and what it changes of them on their way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lookahead_vllm.draft.tree import DraftForest


class Shape(NamedTuple):
    """The fields of a `DraftTree` that are not its tokens, as lists."""

    parents: list[int]
    probs: list[float]
    sources: list[int]


EMPTY = Shape([], [], [])


class Sent(NamedTuple):
    """A draft as it was proposed."""

    forest: DraftForest
    tree: int
    """Its number in the forest."""
    tokens: list[int]

    @property
    def shape(self) -> Shape:
        """What it is beside its tokens."""
        tree = self.forest[self.tree]
        return Shape(tree.parents.tolist(), tree.probs.tolist(), tree.sources.tolist())


class Proposed(NamedTuple):
    """What comes to the scheduler with `ModelRunnerOutput`."""

    drafts: Mapping[str, Sent]
    """By request id; also of requests that were not in the step, and wait with theirs."""
    req_ids: Sequence[str]
    """The requests of the step."""
    has_grammars: bool = False
    """Whether any live request is under a grammar."""
    least_beside_prompt: float = 0.0
    """What a node's probability must be at least to pay in a step that reads a prompt too."""


class Changed(NamedTuple):
    """What goes to the runner with `SchedulerOutput`."""

    shapes: Mapping[str, Shape]
    """Of the drafts that a grammar changed, by request id."""
    kept_blocks: Mapping[str, list[int]]
    """Requests that gave KV blocks back, and how many each still has in each KV cache group."""


NOTHING_PROPOSED = Proposed({}, ())
NOTHING_CHANGED = Changed({}, {})
_ATTRIBUTE = "lookahead"


def attach(carrier: Any, what: Proposed | Changed) -> None:
    """Send `what` along with an object of vLLM's."""
    setattr(carrier, _ATTRIBUTE, what)


def proposed(model_runner_output: Any) -> Proposed | None:
    """What came along with `ModelRunnerOutput`; None: the step made no drafts."""
    return getattr(model_runner_output, _ATTRIBUTE, None)


def changed(scheduler_output: Any) -> Changed:
    """What came along with `SchedulerOutput`."""
    return getattr(scheduler_output, _ATTRIBUTE, NOTHING_CHANGED)
