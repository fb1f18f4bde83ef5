"""The proposers that can be simulated, by name and settings."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.proposers.proposer import Proposer
from lookahead_vllm.draft.proposers.registry import make_proposer
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.server import CHAIN_LENGTH, HAVE_WINDOW, PROPOSERS, LookaheadOptions
from lookahead_vllm.simulation.peers import PEERS

Make = Callable[[int, CostCurve | None, int], Proposer]
"""Makes a proposer for a budget in nodes. With a cost curve, it may send fewer. It has a table for
texts of so many tokens."""

NAMES = [name for name in PROPOSERS if name not in HAVE_WINDOW]


def proposer_of(
    options: LookaheadOptions, budget: int, curve: CostCurve | None, num_tokens: int = 0
) -> Proposer:
    """A proposer with these options of a server, on which texts of `num_tokens` are live."""
    sent = budget if curve is None else "auto"
    options = replace(options, num_speculative_tokens=budget, budget=sent)
    proposer = make_proposer(options, num_tokens)
    proposer.cost = None if curve is None else StepCost(curve)
    # Results do not depend on speed: each prompt is inserted at once, unless a replay limits it.
    cast(Any, proposer).insertion.seconds = math.inf
    return proposer


def choose_proposers(names: str) -> dict[str, Make]:
    """Parse the names of the proposers to simulate, in order.

    They are separated by commas, each possibly with settings, as in `ngram_trie:max_nodes=50000`.

    Raises
    ------
    OptionError
        A name or a setting is unknown, wrong or given twice.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    if not given:
        raise OptionError("--proposers: name at least one, as in ngram_trie:max_nodes=50000")
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
    name, *texts = spec.split(":")
    if name in PEERS:
        if texts:
            raise OptionError(f"{name} has no settings here; leave {':'.join(texts)} out")
        PEERS[name]()  # raises if it is not installed
        return lambda budget, curve, num_tokens: PEERS[name]()
    if name in HAVE_WINDOW:
        raise OptionError(
            "it learns from the model's choices, which a recording does not have; measure it with "
            "scripts/bench.py"
        )
    if name not in NAMES:
        names = [*NAMES, *PEERS]
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
        raise OptionError(f"there is no such proposer; {hint}")
    settings: dict[str, object] = {"proposer": name}
    for text in texts:
        pair = key_value(text)
        if pair is None:
            raise OptionError(f"{text!r} is not KEY=VALUE, as in ngram_trie:max_nodes=50000")
        settings[pair[0]] = pair[1]
    for key in ("num_speculative_tokens", "budget"):
        if key in settings:
            raise OptionError(f"{key} is the simulator's to set; leave it out")
    if isinstance(settings.get("drafter"), int):
        settings["drafter"] = {CHAIN_LENGTH: settings["drafter"]}
    return partial(proposer_of, LookaheadOptions.from_dict(settings))


def key_value(text: str) -> tuple[str, Any] | None:
    """Parse `KEY=VALUE`. A value that is not JSON is a string. None if there is no key."""
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        return None
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
