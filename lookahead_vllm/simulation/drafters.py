"""Who can be simulated: the proposers of this package and their rivals, each by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

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
    """A proposer as the simulator plays it: `start`, `extend` and `propose` are what it times."""

    def start(self, request_id: str, prompt: Int32s) -> None:
        """A request begins."""

    def extend(self, request_id: str, tokens: list[int]) -> None:
        """The request's next output tokens."""

    def propose(self, limit: DraftLimits, context: Int32s) -> Any:
        """A draft, in the shape that its own engine takes; `context` is the text so far."""

    def tree(self, draft: Any) -> DraftTree:
        """What `propose` returned, as a tree."""

    def finish(self, request_id: str) -> None:
        """The request has ended."""

    @property
    def num_bytes(self) -> int:
        """Memory that its caches hold now."""


Make = Callable[[int, CostCurve | None], Drafter]
"""A fresh drafter for a budget, in nodes; with a cost curve, one that may send fewer."""


class Lookahead:
    """A proposer of this package."""

    def __init__(
        self, settings: Mapping[str, object], budget: int, curve: CostCurve | None
    ) -> None:
        given = {"budget": budget if curve is None else "auto", **settings}
        options = LookaheadOptions.from_dict({"num_speculative_tokens": budget, **given})
        self.proposer = make_proposer(options)
        self.proposer.cost = None if curve is None else StepCost(curve)
        # A prompt is inserted whole, whatever the clock says.
        cast(Any, self.proposer).insertion.seconds = math.inf
        self.start: Callable[[str, Any], None] = self.proposer.start
        self.finish: Callable[[str], None] = self.proposer.finish

    def extend(self, request_id: str, tokens: list[int]) -> None:
        """The request's next tokens."""
        self.proposer.extend({request_id: tokens})

    def propose(self, limit: DraftLimits, context: Int32s) -> DraftTree:
        """The proposer's tree; it knows the text already."""
        return self.proposer.propose([limit])[0]

    def tree(self, draft: DraftTree) -> DraftTree:
        """The tree itself."""
        return draft

    @property
    def num_bytes(self) -> int:
        """What the proposer says; 0 if it says nothing."""
        return int(getattr(self.proposer, "num_bytes", 0))


class Rival(NamedTuple):
    """A drafter of somebody else's, and what can be set."""

    options: Callable[..., Any]
    drafter: Callable[[Any], Drafter]
    about: str


def _suffix_tree(factor: float, offset: float, least: float, depth: int = 24) -> Rival:
    return Rival(
        partial(
            SuffixOptions,
            use_tree_spec=True,
            max_spec_factor=factor,
            max_spec_offset=offset,
            min_token_prob=least,
            max_tree_depth=depth,
        ),
        Suffix,
        f"arctic-inference's trees: factor {factor:g}, offset {offset:g}, least probability "
        f"{least:g}, depth {depth}",
    )


RIVALS = {
    "prompt_lookup": Rival(
        PromptLookupOptions, PromptLookup, "vLLM's `ngram`, with the lengths of scripts/bench.py"
    ),
    "suffix": Rival(
        SuffixOptions, Suffix, "arctic-inference's chains, vLLM's defaults (brings suffix_tree)"
    ),
    "suffix_tree": _suffix_tree(8, 4, 0.02),
    "suffix_tree_f2": _suffix_tree(2, 1, 0.1),
    "suffix_tree_f4": _suffix_tree(4, 2, 0.05),
    "suffix_tree_f16": _suffix_tree(16, 8, 0.01),
    "suffix_tree_d64": _suffix_tree(8, 4, 0.02, depth=64),
}

GROUPS = {
    "suffix": ["suffix", "suffix_tree"],
    "suffix_sweep": [name for name in RIVALS if name.startswith("suffix")],
}
"""Names that stand for several."""

OURS = [name for name in PROPOSERS if name not in HAVE_WINDOW]


def describe() -> str:
    """Every name, a line each."""
    ours = dict.fromkeys(OURS, "of this package")
    rivals = {name: rival.about for name, rival in RIVALS.items()}
    lines = {**ours, **rivals, "suffix_sweep": "all of arctic-inference's above"}
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {about}" for name, about in lines.items())


def choose_drafters(names: str) -> dict[str, Make]:
    """The drafters to simulate, in order.

    Parameters
    ----------
    names : str
        Names separated by commas, each possibly with settings, as in `ngram_trie:branch_length=8`.

    Raises
    ------
    OptionError
        A name or a setting is unknown, wrong or given twice, or a rival is not installed.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise OptionError("--proposers: name at least one, as in ngram_trie,prompt_lookup,suffix")
    chosen: dict[str, Make] = {}
    for spec in [spec for name in wanted for spec in GROUPS.get(name, [name])]:
        if spec in chosen:
            raise OptionError(f"--proposers: {spec} is given twice, or is part of another name")
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
        rival.drafter(options)  # it has to be installed
        return lambda budget, curve: rival.drafter(options)
    if name in HAVE_WINDOW:
        raise OptionError(
            "it learns from what a model says to its drafts, and a recording says nothing; "
            "measure it with scripts/bench_window.py"
        )
    if name in OURS:
        for key in ("num_speculative_tokens", "budget", "proposer"):
            if key in given:
                raise OptionError(f"{key} is the simulator's to set; leave it out")
        LookaheadOptions.from_dict(given)
        return partial(Lookahead, {"proposer": name, **given})
    known = list(dict.fromkeys([*OURS, *RIVALS, *GROUPS]))
    raise OptionError(f"there is no such proposer; {_hint(name, known)}")


def _hint(given: str, known: Sequence[str]) -> str:
    close = get_close_matches(given, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


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
    """`KEY=VALUE` with a value in JSON, or else a string; None if it is no such thing."""
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        return None
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
