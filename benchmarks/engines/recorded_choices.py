"""Recorded choices: what a model says at each token of an answer, and stands in for elsewhere.

A file of `scripts/record_choices.py` (.npz) has `ids`, str [t], the traces; `firsts`, int64 [t+1];
`tokens`, int32 [n, 8], the model's likeliest tokens, the likeliest first; and `gaps`, float16
[n, 8], the best logit minus each of theirs. Row `firsts[i] + j` belongs to output token j of
trace i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.choices_file import load_choices
from lookahead_vllm.simulation.traces import TraceError

Context: TypeAlias = tuple[int, ...]
"""The last two tokens, or the last one."""


class ChoicesError(ValueError):
    """A file has no choices that fit; the message names it."""


class Choices(NamedTuple):
    """The likeliest tokens after a text.

    Attributes
    ----------
    tokens : int32 [k]
    gaps : float [k]
        The best logit minus each token's.
    """

    tokens: NDArray[np.int32]
    gaps: NDArray[np.floating]


Traces = dict[str, Choices]
"""By the id of a trace: its choices, both arrays [answer, k]."""


def read(files: Iterable[str | Path]) -> Traces:
    """The traces of all files; raises ChoicesError for a file that is not one of choices."""
    traces: Traces = {}
    for path in files:
        try:
            loaded = load_choices(Path(path))
        except TraceError as error:
            raise ChoicesError(str(error)) from None
        for name, choices in loaded.items():
            traces[name] = Choices(choices.tokens, choices.gaps.astype(np.float32))
    return traces


class RecordedChoices:
    """Finds the choices for a token of a recorded text, and for a token that is none.

    Parameters
    ----------
    prompts, answers
        The recorded texts, token ids.
    traces : sequence of Choices
        The choices of each text.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        traces: Sequence[Choices],
    ) -> None:
        self._starts = [len(prompt) for prompt in prompts]
        self._traces = traces
        # Of every context: where it occurs first, and first in another text.
        self._contexts: dict[Context, list[tuple[int, int]]] = {}
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            text = [*prompt[-2:], *answer]
            begin = len(text) - len(answer)
            for j in range(min(len(answer), len(traces[number].tokens))):
                for context in (tuple(text[begin + j - 2 : begin + j]), (text[begin + j - 1],)):
                    places = self._contexts.setdefault(context, [])
                    if not places or (len(places) == 1 and places[0][0] != number):
                        places.append((number, j))

    def at(self, number: int, position: int) -> Choices | None:
        """The choices for the token at a position of a text; None where none were recorded."""
        j = position - self._starts[number]
        trace = self._traces[number]
        if not 0 <= j < len(trace.tokens):
            return None
        return Choices(trace.tokens[j], trace.gaps[j])

    def after(self, number: int, before: int, last: int) -> Choices | None:
        """The choices after two tokens that a draft put there instead of a text's own.

        They are those that were recorded after the same two tokens in another text, else after the
        last one; None if it occurs in none. The text's own are never taken: they could tell what
        it goes on with.
        """
        for context in ((before, last), (last,)):
            for other, j in self._contexts.get(context, ()):
                if other != number:
                    trace = self._traces[other]
                    return Choices(trace.tokens[j], trace.gaps[j])
        return None
