"""The replies of an engine, and how those of two engines differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from typing import Any

from tests.fuzz.round import Request

LOGPROB_TOLERANCE = 1e-3
FORBIDDEN_LOGPROB = -1e6
"""Logprobs below this are those of forbidden tokens."""
ZERO_PROBABILITY_GAP = 104.0
"""A token this many nats below the best has probability 0 in float32; vLLM forbids it if another
request of the batch has a top-p."""


@dataclass
class Answer:
    """One of the n answers to a request, or the answer to a session's turn."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: tuple[Any, Any] = (None, None)


@dataclass
class Reply:
    """Everything that the engine returns for one request."""

    answers: dict[int, Answer] = field(default_factory=dict)
    prompt_logprobs: Any = None
    refused: str | None = None

    def add(self, output: Any, streamed: bool, turn: int = 0) -> None:
        """Append an output, or replace the earlier ones if it is not streamed.

        The answer to each turn of a session is an answer of its own.
        """
        if output.prompt_logprobs:
            self.prompt_logprobs = list(output.prompt_logprobs)  # it may be a FlatLogprobs
        for part in output.outputs:
            answer = self.answers.setdefault(turn + part.index, Answer())
            if streamed:
                answer.tokens += part.token_ids
                answer.text += part.text
                answer.logprobs += part.logprobs or ()
            else:
                answer.tokens = list(part.token_ids)
                answer.text = part.text
                answer.logprobs = list(part.logprobs or ())
            answer.finish = (part.finish_reason, part.stop_reason)


@dataclass
class Difference:
    index: int
    what: str
    plain: Any
    lookahead: Any


def differences(
    requests: Sequence[Request], plain: Sequence[Reply], mine: Sequence[Reply]
) -> list[Difference]:
    """The first difference of each request whose replies differ."""
    found = []
    for i, (request, a, b) in enumerate(zip(requests, plain, mine, strict=True)):
        if a.refused != b.refused:
            found.append(Difference(i, "refusals", a.refused, b.refused))
        elif request.abort_after is not None:
            if not all(
                _begins_alike(a.answers[k].tokens, b.answers[k].tokens)
                for k in a.answers.keys() & b.answers.keys()
            ):
                found.append(Difference(i, "tokens of an aborted request", a, b))
        elif a.answers.keys() != b.answers.keys():
            found.append(Difference(i, "number of answers", a, b))
        else:
            for what in ("tokens", "text", "finish", "logprobs"):
                parts = [
                    {k: getattr(answer, what) for k, answer in reply.answers.items()}
                    for reply in (a, b)
                ]
                if not alike(*parts):
                    found.append(Difference(i, what, *parts))
                    break
            else:
                if not alike(a.prompt_logprobs, b.prompt_logprobs):
                    found.append(
                        Difference(i, "prompt_logprobs", a.prompt_logprobs, b.prompt_logprobs)
                    )
    return found


def agreement(a: Reply, b: Reply) -> int:
    """How many tokens of the prompt and of all answers are alike, with their logprobs, before the
    first one of each answer that is not."""
    texts = [(a.prompt_logprobs or (), b.prompt_logprobs or ())]
    for k in a.answers.keys() & b.answers.keys():
        texts.append(tuple(_with_logprobs(reply.answers[k]) for reply in (a, b)))
    return sum(
        len(list(takewhile(lambda pair: alike(*pair), zip(*pair, strict=False)))) for pair in texts
    )


def _with_logprobs(answer: Answer) -> list[tuple[int, Any]]:
    return list(zip_longest(answer.tokens, answer.logprobs))


def _begins_alike(a: list[int], b: list[int]) -> bool:
    n = min(len(a), len(b))
    return a[:n] == b[:n]


def alike(a: Any, b: Any) -> bool:
    """Whether both are equal; logprobs may differ by rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a and all(hasattr(v, "logprob") for v in (*a.values(), *b.values())):
            return _same_alternatives(a, b)
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _same_alternatives(a: dict[int, Any], b: dict[int, Any]) -> bool:
    """Compare the logprobs at one position; the least likely tokens may differ if they tie."""
    if len(a) != len(b):
        return False
    for one, other in ((_logprobs(a), _logprobs(b)), (_logprobs(b), _logprobs(a))):
        least = min(other.values())
        if not all(_close(value, other.get(token, least)) for token, value in one.items()):
            return False
    return True


def _logprobs(alternatives: dict[int, Any]) -> dict[int, float]:
    """Logprobs by token; minus infinity for tokens of probability 0 in float32."""
    best = max(v.logprob for v in alternatives.values())
    return {
        token: -math.inf if v.logprob < best - ZERO_PROBABILITY_GAP else v.logprob
        for token, v in alternatives.items()
    }


def _close(a: float, b: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if max(a, b) < FORBIDDEN_LOGPROB:  # one is minus infinity if another request has a top-k
        return True
    return a == b or math.isclose(a, b, rel_tol=LOGPROB_TOLERANCE, abs_tol=LOGPROB_TOLERANCE)
