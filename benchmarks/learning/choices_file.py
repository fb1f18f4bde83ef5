"""Recorded choices: a model's likeliest tokens at every position of recorded answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.simulation.traces import TraceError

SUFFIX = ".choices.npz"


class AnswerChoices(NamedTuple):
    """A model's likeliest tokens at the positions of an answer of m tokens."""

    tokens: NDArray[np.int32]
    """int32 [m, k]: row j has the k likeliest tokens in place of output token j, best first."""
    gaps: NDArray[np.float16]
    """float16 [m, k]: the best token's logit minus each one's."""


def save_choices(
    path: Path, ids: Sequence[str], choices: Sequence[AnswerChoices], model: str, dtype: str
) -> None:
    """Write the choices of the traces `ids`, made by `model` computing in `dtype`."""
    firsts = np.cumsum([0, *(len(one.tokens) for one in choices)])
    np.savez_compressed(
        path,
        ids=np.array(ids, np.str_),
        firsts=firsts.astype(np.int64),
        tokens=np.concatenate([one.tokens for one in choices]).astype(np.int32),
        gaps=np.concatenate([one.gaps for one in choices]).astype(np.float16),
        model=model,
        dtype=dtype,
    )


def load_choices(path: Path) -> dict[str, AnswerChoices]:
    """Read a file that `save_choices` has written: the choices by the id of their trace.

    Raises
    ------
    TraceError
        The file is missing or is no such file.
    """
    if not path.is_file():
        raise TraceError(f"--choices: there is no file {path}")
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            ids, firsts = file["ids"], file["firsts"]
            tokens, gaps = file["tokens"].astype(np.int32), file["gaps"].astype(np.float16)
            rows = [
                AnswerChoices(tokens[first:end], gaps[first:end])
                for first, end in pairwise(firsts.tolist())
            ]
            return dict(zip(ids.tolist(), rows, strict=True))
    except Exception as error:  # a damaged archive raises errors of many types
        reason = str(error) or type(error).__name__
        raise TraceError(
            f"--choices: {path} was not written by scripts/record_choices.py ({reason})"
        ) from None
