"""Which requests get no draft for now, in one place.

What a node's token depends on must be known at every node. Where a sampling feature looks at the
path that led to a node, or masks tokens by it, lookahead does not evaluate it on a tree yet; such
a request gets an empty tree, never an approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class Exclusion(NamedTuple):
    feature: str
    applies: Callable[[SamplingParams], object]


EXCLUSIONS = (
    Exclusion("repetition_penalty", lambda p: p.repetition_penalty != 1.0),
    Exclusion("presence_penalty", lambda p: p.presence_penalty != 0.0),
    Exclusion("frequency_penalty", lambda p: p.frequency_penalty != 0.0),
    Exclusion("bad_words", lambda p: p.bad_words),
    Exclusion("min_tokens", lambda p: p.min_tokens > 0),
    Exclusion("allowed_token_ids", lambda p: p.allowed_token_ids is not None),
    Exclusion("thinking_token_budget", lambda p: p.thinking_token_budget is not None),
    Exclusion("logprob_token_ids", lambda p: p.logprob_token_ids),
    Exclusion("structured_outputs", lambda p: p.structured_outputs is not None),
    Exclusion("trace_decode_token_ids", lambda p: p.trace_decode_token_ids is not None),
)


def excluded_feature(params: SamplingParams | None) -> str | None:
    """The first feature of a request that keeps it from being drafted for, or None."""
    if params is None:
        return "pooling"
    return next((e.feature for e in EXCLUSIONS if e.applies(params)), None)
