"""Recorded choices: a model's likeliest tokens at every position of recorded answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from lookahead_vllm.simulation.traces import AnswerChoices, TraceError, TraceFile

SUFFIX = ".choices.npz"


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


def with_choices(file: TraceFile, paths: Sequence[Path], num_choices: int) -> TraceFile:
    """The file's traces with the recorded choices, `num_choices` at each position.

    `paths` has the files of choices; those of NAME.jsonl are in NAME.choices.npz.

    Raises
    ------
    TraceError
        The choices of a trace are missing, too few, or those of another answer.
    """
    path = next((path for path in paths if path.name == file.path.stem + SUFFIX), None)
    if path is None:
        raise TraceError(f"--choices: no file is named {file.path.stem + SUFFIX}, for {file.path}")
    recorded = load_choices(path)
    traces = []
    for trace in file.traces:
        if trace.id not in recorded:
            raise TraceError(
                f"--choices: {path} has none of trace {trace.id!r}; record more traces, or leave "
                f"this one out: it has {len(recorded)}, and --limit takes the first ones"
            )
        tokens, gaps = recorded[trace.id]
        if len(tokens) != len(trace.output) or tokens.shape[1] < num_choices:
            raise TraceError(
                f"--choices: {path} has {tokens.shape[1]} choices at {len(tokens)} positions of "
                f"trace {trace.id!r}, where {num_choices} at {len(trace.output)} are needed"
            )
        choices = AnswerChoices(tokens[:, :num_choices], gaps[:, :num_choices])
        traces.append(replace(trace, choices=choices))
    return replace(file, traces=traces)
