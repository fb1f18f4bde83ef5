"""Traces: recorded generations, read from JSON lines."""

import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lookahead_vllm.draft.cache.warming import Renderer, check_line, longest_chats, turns_of
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
    chains: Int32s | None = None
    """int32 [outputs, K, NUM_ALTERNATIVES, 2]: what a trained drafter proposed after each output
    token, as in `draft/progress.py`."""
    turn: int = 0
    """How many turns of the same session are before it."""


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

    @property
    def sessions(self) -> list[list[Trace]]:
        """The turns of each session, in order; a trace that is no turn is alone."""
        sessions: list[list[Trace]] = []
        for trace in self.traces:
            if trace.turn:
                sessions[-1].append(trace)
            else:
                sessions.append([trace])
        return sessions


def load_traces(
    path: Path,
    limit: int | None = None,
    shuffle: int | None = None,
    no_loops: bool = False,
    renderer: Renderer | None = None,
) -> TraceFile:
    """Read a file of JSON lines, which `lookahead-vllm simulate --help` describes.

    A chat with which another one begins is left out, as a log of requests has each conversation
    once a turn. One that a server would refuse is named and left out.

    Parameters
    ----------
    path : Path
        The file, or a folder, all `.jsonl` files below which are read as one.
    limit : int, optional
        Keep this many traces, after `shuffle` and `no_loops`.
    shuffle : int, optional
        Shuffle the lines with this seed.
    no_loops : bool
        Leave out lines with `loops: true`.
    renderer : Renderer, optional
        Of the model, for lines of text.

    Raises
    ------
    TraceError
        The file is missing, a line is not such an object, or nothing is left to replay.
    """
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not path.exists():
        raise TraceError(f"there is no file {path}")
    read = [
        (f"{file}, line {number}", value)
        for file in files
        for number, value in read_json_lines(file, TraceError)
    ]
    lines: list[tuple[list[Trace], bool]] = []
    missing = math.inf if limit is None or shuffle is not None else limit
    chosen = [*longest_chats(lambda: read)]
    bar = tqdm(chosen, f"Reading {path.name}", unit="line", leave=False, disable=None)
    for place, line in bar:
        if missing <= 0:  # rendering a chat takes milliseconds a turn
            break
        lines.append((_traces(place, line, renderer), bool(line.get("loops"))))
        traces, loops = lines[-1]
        if not (no_loops and loops):
            missing -= sum(len(one.output) > 1 for one in traces)
    if not lines:
        raise TraceError(f"{path} is empty: one JSON object a line is expected")
    num_all = sum(len(traces) for traces, _ in lines)
    kept = [traces for traces, loops in lines if not (no_loops and loops)]
    num_kept = sum(map(len, kept))
    if shuffle is not None:
        random.Random(shuffle).shuffle(kept)
    long_enough = ([one for one in traces if len(one.output) > 1] for traces in kept)
    traces = [replace(one, turn=i) for session in long_enough for i, one in enumerate(session)]
    too_short = num_kept - len(traces)
    if not num_all:
        raise TraceError(f"{path}: nothing is left to replay: all lines were skipped")
    if not traces:
        raise TraceError(
            f"{path}: nothing is left to replay; of {num_all} answers, {num_all - num_kept} "
            f"loop (--no-loops) and {too_short} have fewer than two output tokens"
        )
    return TraceFile(path, traces[:limit], too_short)


def _traces(place: str, line: Any, renderer: Renderer | None) -> list[Trace]:
    """The traces of a line, which `place` names in errors."""
    recorded = {"turns", "prompt_token_ids", "output_token_ids"}
    if not isinstance(line, dict) or not recorded & line.keys():
        return _rendered(place, line, renderer)
    if "turns" not in line:
        return [_trace(place, line)]
    if not isinstance(line["turns"], list) or not all(isinstance(t, dict) for t in line["turns"]):
        raise TraceError(f"{place}: `turns` must be a list of objects with `prompt_token_ids`")
    turns = [_trace(f"{place}, turn {i}", line | turn) for i, turn in enumerate(line["turns"], 1)]
    parts = [part for turn in turns for part in (turn.prompt, turn.output)]
    text = np.concatenate(parts) if parts else np.empty(0, np.int32)
    ends = np.cumsum([len(part) for part in parts])[::2]  # of the prompts, which share the text
    return [replace(turn, prompt=text[:end]) for turn, end in zip(turns, ends, strict=True)]


def _rendered(place: str, line: Any, renderer: Renderer | None) -> list[Trace]:
    try:
        check_line(line)
    except ValueError as error:
        raise TraceError(f"{place}: {error}") from None
    if renderer is None:
        raise TraceError(f"{place}: a text needs the model's tokenizer; write --model MODEL")
    try:
        texts = list(turns_of(line, renderer))
    except ValueError as error:
        tqdm.write(f"skipped: {place}: {error}", file=sys.stderr)
        return []
    return [
        Trace(np.array(text.prompt, np.int32), np.array(text.answer, np.int32), _category(line))
        for text in texts
    ]


def _category(line: dict[str, Any]) -> str:
    names = [str(line[key]) for key in ("suite", "category") if line.get(key)]
    return "/".join(names) or "all"


def _trace(place: str, line: dict[str, Any]) -> Trace:
    return Trace(
        _token_ids(place, line, "prompt_token_ids"),
        _token_ids(place, line, "output_token_ids"),
        _category(line),
        _chains(place, line),
    )


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
