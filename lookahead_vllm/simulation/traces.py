"""Traces: recorded generations, read from JSON lines."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.progress import NUM_ALTERNATIVES
from lookahead_vllm.json_lines import are_token_ids, read_json_lines

Int32s = NDArray[np.int32]


class TraceError(ValueError):
    """The traces cannot be used; the message names the file, the line and what is expected."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded generation: `prompt` and `output` are int32; `category` is `suite/category`."""

    prompt: Int32s
    output: Int32s
    category: str
    id: str = ""
    chains: Int32s | None = None
    """int32 [outputs, K, NUM_ALTERNATIVES, 2]: what a trained drafter proposed after each output
    token, as in `draft/progress.py`."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The traces of one file, in the order in which they are replayed.

    Outputs of fewer than two tokens are left out, as they have no decode step: the prefill emits
    the first token. `too_short` is their number.
    """

    path: Path
    traces: list[Trace]
    too_short: int

    @property
    def num_tokens(self) -> int:
        """The number of output tokens of all traces."""
        return sum(len(trace.output) for trace in self.traces)


def load_traces(
    path: Path, limit: int | None = None, shuffle: int | None = None, no_loops: bool = False
) -> TraceFile:
    """Read a JSON-lines file of objects with `prompt_token_ids` and `output_token_ids`.

    The keys `id`, `suite`, `category`, `loops` and `chains` are optional.

    Parameters
    ----------
    path : Path
        The file.
    limit : int, optional
        Keep this many traces, after `shuffle` and `no_loops`.
    shuffle : int, optional
        Shuffle with this seed; the file's order if omitted.
    no_loops : bool
        Leave out lines with `loops: true`.

    Raises
    ------
    TraceError
        The file is missing, a line is not such an object, or nothing is left to replay.
    """
    if not path.is_file():
        raise TraceError(f"--traces: there is no file {path}")
    lines = [
        _trace(f"{path}, line {number}", value)
        for number, value in read_json_lines(path, TraceError)
    ]
    if not lines:
        raise TraceError(f"{path} is empty: one JSON object a line is expected")
    kept = [trace for trace, loops in lines if not (no_loops and loops)]
    traces = [trace for trace in kept if len(trace.output) > 1]
    too_short = len(kept) - len(traces)
    if shuffle is not None:
        random.Random(shuffle).shuffle(traces)
    if not traces:
        raise TraceError(
            f"{path}: nothing is left to replay; of {len(lines)} traces, {len(lines) - len(kept)} "
            f"loop (--no-loops) and {too_short} have fewer than two output tokens"
        )
    return TraceFile(path, traces[:limit], too_short)


def _trace(place: str, line: Any) -> tuple[Trace, bool]:
    """The trace of a line, and its `loops`. `place` names the line in errors."""
    if not isinstance(line, dict):
        raise TraceError(f"{place}: an object with `prompt_token_ids` is expected")
    names = [str(line[key]) for key in ("suite", "category") if line.get(key)]
    trace = Trace(
        _token_ids(place, line, "prompt_token_ids"),
        _token_ids(place, line, "output_token_ids"),
        "/".join(names) or "all",
        str(line.get("id", "")),
        _chains(place, line),
    )
    return trace, bool(line.get("loops"))


def _token_ids(place: str, line: dict[str, Any], key: str) -> Int32s:
    ids = line.get(key)
    if not are_token_ids(ids):
        raise TraceError(f"{place}: `{key}` must be a list of token ids")
    return np.array(ids, dtype=np.int32)


def _chains(place: str, line: dict[str, Any]) -> Int32s | None:
    if line.get("chains") is None:
        return None
    try:
        chains = np.array(line["chains"], np.int32)
    except (TypeError, ValueError, OverflowError):
        chains = np.empty(0, np.int32)
    outputs, *chain = len(line["output_token_ids"]), NUM_ALTERNATIVES, 2
    if chains.ndim != 4 or chains.shape != (outputs, chains.shape[1], *chain):
        raise TraceError(
            f"{place}: `chains` must have, for each output token and each depth, "
            f"{NUM_ALTERNATIVES} pairs of a token and a class"
        )
    return chains
