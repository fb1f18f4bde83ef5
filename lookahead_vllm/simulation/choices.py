"""Recorded choices: a model's likeliest tokens at every position of recorded answers."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from lookahead_vllm.simulation.traces import AnswerChoices, TraceError, TraceFile

SUFFIX = ".choices.npz"

_KINDS = {"ids": "U", "firsts": "iu", "tokens": "iu", "gaps": "f"}
"""The arrays of a file, and the kinds of their dtypes."""

_DAMAGED = (
    *(OSError, KeyError, ValueError, TypeError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)
"""What NumPy raises for files that are no archive of arrays, or no longer one."""


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
            arrays = {name: np.asarray(file[name]) for name in _KINDS}
    except _DAMAGED as error:
        reason = str(error) or type(error).__name__
        raise TraceError(
            f"--choices: {path} was not written by scripts/record_choices.py ({reason})"
        ) from None
    ids, firsts, tokens, gaps = arrays.values()
    if (
        (ids.ndim, firsts.ndim, tokens.ndim) != (1, 1, 2)
        or (len(firsts), gaps.shape) != (len(ids) + 1, tokens.shape)
        or (firsts[0], firsts[-1]) != (0, len(tokens))
    ):
        raise TraceError(
            f"--choices: {path}: the shapes of ids {ids.shape}, firsts {firsts.shape}, tokens "
            f"{tokens.shape} and gaps {gaps.shape} do not fit together; record it again"
        )
    for name, kinds in _KINDS.items():
        if arrays[name].dtype.kind not in kinds:
            raise TraceError(
                f"--choices: {path}: {name} cannot be {arrays[name].dtype}; record it again"
            )
    if (np.diff(firsts) < 0).any() or (tokens < 0).any() or (tokens >= 2**31).any():
        raise TraceError(
            f"--choices: {path}: firsts must rise, and tokens be token ids; record it again"
        )
    tokens, gaps = tokens.astype(np.int32), gaps.astype(np.float16)
    rows = [AnswerChoices(tokens[first:end], gaps[first:end]) for first, end in pairwise(firsts)]
    return dict(zip(ids.tolist(), rows, strict=True))


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
