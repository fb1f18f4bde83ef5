"""The drafters that can be simulated: this package's proposers and their rivals, by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from lookahead_vllm.draft.allowed import folded
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.options import LookaheadOptions, OptionError
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.registry import HAVE_WINDOW, PROPOSERS, make_proposer
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.simulation.rivals import (
    PromptLookup,
    PromptLookupOptions,
    Suffix,
    SuffixOptions,
)
from lookahead_vllm.simulation.traces import Int32s


class Drafter(Protocol):
    """The simulator's interface to a proposer. It times all but `tree`."""

    def start(self, request_id: str, prompt: Int32s) -> None:
        """Start a request."""

    def extend(self, request_id: str, tokens: list[int]) -> None:
        """Append output tokens to the request."""

    def propose(self, limit: DraftLimits, context: Int32s) -> Any:
        """Draft in the drafter's own format; `context` is the text so far, int32 [n]."""

    def tree(self, draft: Any) -> DraftTree:
        """Convert a draft from `propose` to a tree."""

    def finish(self, request_id: str) -> None:
        """End the request."""


Make = Callable[[int, CostCurve | None], Drafter]
"""Makes a drafter for a budget in nodes. With a cost curve, the drafter may send fewer."""


class Lookahead:
    """A proposer of this package."""

    def __init__(
        self, settings: Mapping[str, object], budget: int, curve: CostCurve | None
    ) -> None:
        given = {"budget": budget if curve is None else "auto", **settings}
        options = LookaheadOptions.from_dict({"num_speculative_tokens": budget, **given})
        self.proposer = make_proposer(options)
        self.proposer.cost = None if curve is None else StepCost(curve)
        # Without a time limit, each prompt is inserted at once and results do not depend on speed.
        cast(Any, self.proposer).insertion.seconds = math.inf
        self.start: Callable[[str, Any], None] = self.proposer.start
        self.finish: Callable[[str], None] = self.proposer.finish

    def extend(self, request_id: str, tokens: list[int]) -> None:
        """Append output tokens to the request."""
        self.proposer.extend({request_id: tokens})

    def propose(self, limit: DraftLimits, context: Int32s) -> DraftTree:
        """Return the proposer's tree; `context` is unused."""
        return self.proposer.propose([limit])[0]

    def tree(self, draft: DraftTree) -> DraftTree:
        """Return the draft, which is a tree already."""
        return draft


class Rival(NamedTuple):
    """Another project's drafter, its options and a description."""

    options: Callable[..., Any]
    drafter: Callable[[Any], Drafter]
    about: str


RIVALS = {
    "prompt_lookup": Rival(
        PromptLookupOptions, PromptLookup, "vLLM's `ngram`, with the lengths of scripts/bench.py"
    ),
    "suffix": Rival(SuffixOptions, Suffix, "arctic-inference's chains, vLLM's defaults"),
    "suffix_tree": Rival(
        partial(
            SuffixOptions,
            use_tree_spec=True,
            max_spec_factor=8.0,
            max_spec_offset=4.0,
            min_token_prob=0.02,
        ),
        Suffix,
        "its trees: factor 8, offset 4, least probability 0.02",
    ),
}

OURS = [name for name in PROPOSERS if name not in HAVE_WINDOW]


def describe() -> str:
    """List the names, one on each line, with a description."""
    ours = dict.fromkeys(OURS, "of this package")
    rivals = {name: rival.about for name, rival in RIVALS.items()}
    lines = {**ours, **rivals}
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {about}" for name, about in lines.items())


def choose_drafters(names: str) -> dict[str, Make]:
    """Parse the names of the drafters to simulate, in order.

    Parameters
    ----------
    names : str
        Names separated by commas, each possibly with settings, as in `ngram_trie:branch_length=8`.

    Raises
    ------
    OptionError
        A name or a setting is unknown, wrong or given twice, or a rival is not installed.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    if not given:
        raise OptionError("--proposers: name at least one, as in ngram_trie,prompt_lookup,suffix")
    chosen: dict[str, Make] = {}
    for spec in given:
        if spec in chosen:
            raise OptionError(f"--proposers: {spec} is given twice")
        try:
            chosen[spec] = _maker(spec)
        except OptionError as error:
            raise OptionError(f"--proposers: {spec}: {error}") from None
    return chosen


def _maker(spec: str) -> Make:
    name, *settings = spec.split(":")
    given = dict(_setting(text) for text in settings)
    if name in RIVALS:
        rival = RIVALS[name]
        options = _options(rival.options, given)
        rival.drafter(options)  # raises if the rival is not installed
        return lambda budget, curve: rival.drafter(options)
    if name in HAVE_WINDOW:
        raise OptionError(
            "it learns from the model's choices, which a recording does not have; measure it with "
            "scripts/bench.py"
        )
    if name in OURS:
        for key in ("num_speculative_tokens", "budget", "proposer"):
            if folded(key) in map(folded, given):
                raise OptionError(f"{key} is the simulator's to set; leave it out")
        settings_of = {"proposer": name, **given}
        LookaheadOptions.from_dict(settings_of)
        return partial(Lookahead, settings_of)
    raise OptionError(f"there is no such proposer; {_hint(name, [*OURS, *RIVALS])}")


def _hint(given: str, choices: Sequence[str]) -> str:
    close = get_close_matches(given, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(choices)}"


def _setting(text: str) -> tuple[str, object]:
    pair = key_value(text)
    if pair is None:
        raise OptionError(f"{text!r} is not KEY=VALUE, as in ngram_trie:branch_length=8")
    return pair


def _options(make: Callable[..., Any], given: Mapping[str, object]) -> Any:
    defaults = make()
    types = {field.name: type(getattr(defaults, field.name)) for field in fields(defaults)}
    for key, value in given.items():
        if key not in types:
            raise OptionError(f"there is no setting {key!r}; {_hint(key, list(types))}")
        if type(value) is not types[key] and not (types[key] is float and type(value) is int):
            kind = {bool: "true or false", int: "a whole number", float: "a number"}[types[key]]
            raise OptionError(f"{key}={value!r} was given, but it must be {kind}")
    return make(**given)


def key_value(text: str) -> tuple[str, Any] | None:
    """Parse `KEY=VALUE`. A value that is not JSON is a string. None if there is no key."""
    key, separator, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not separator or not key.isidentifier():
        return None
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
