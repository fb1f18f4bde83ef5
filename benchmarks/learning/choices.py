"""Record a model's likeliest tokens at every position of recorded answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.command_line import kv_cache_bytes
from benchmarks.learning.choices_file import SUFFIX, AnswerChoices, save_choices
from lookahead_vllm.cli.arguments import check_output, escape_unprintable, positive
from lookahead_vllm.draft.trie.recycling import NUM_CHOICES
from lookahead_vllm.simulation.traces import (
    Trace,
    TraceError,
    TraceFile,
    load_traces,
)

EPILOG = """\
example:
  scripts/cpu_env.sh .venv/bin/python scripts/record_choices.py \\
      --model .cache/models/SmolLM2-135M-Instruct --traces spec.jsonl --out choices

a line of the traces:
  {"id": "sb-81", "prompt_token_ids": [1, 9690, ...], "output_token_ids": [504, ...]}
  All three are needed; ids differ. Answers of fewer than two tokens are left out, as in simulate.

method:
  Plain vLLM computes prompt and answer in one request, as a prompt (teacher forcing), one trace
  after another. So the choices at a position follow from the recorded tokens before it, whoever
  wrote them. The same machine, model, dtype and traces give the same file.

the files, FOLDER/NAME.choices.npz for NAME.jsonl; t traces, n output tokens, k choices:
  ids     str [t]         the ids of the traces
  firsts  int64 [t + 1]   row firsts[i] + j has the choices in place of output token j of trace i
  tokens  int32 [n, k]    the likeliest tokens, best first
  gaps    float16 [n, k]  the best token's logit minus each one's
  model, dtype            str: the model's name, and the type that it was computed in

`bench.py --choices FILE.choices.npz` reads them. The exit status is 0, 1 if vLLM fails, 2 for
wrong options or traces.
"""


def main(arguments: Sequence[str]) -> int:
    """The command."""
    escape_unprintable()
    options = _parser().parse_args(arguments)
    try:
        files = [load_traces(path, options.limit) for path in dict.fromkeys(options.traces)]
        _check(files, options.out, _max_positions(options.model))
    except TraceError as error:
        print(f"record_choices: {error}", file=sys.stderr)
        return 2
    lengths = [_length(trace) for file in files for trace in file.traces]
    with closing(_recorder(options, max(lengths))) as record, tqdm(total=sum(lengths)) as bar:
        for file in files:
            bar.set_description(file.path.stem)
            path = _path(file, options.out)
            choices = list(_record_all(file.traces, record, bar.update))
            save_choices(
                path, [t.id for t in file.traces], choices, Path(options.model).name, record.dtype
            )
            tqdm.write(f"{path}: {len(choices)} traces, {file.num_tokens} tokens")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="record_choices.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="the model's folder, or its name on a hub")
    add("--traces", required=True, nargs="+", type=Path, metavar="FILE.jsonl", help="see below")
    add("--out", required=True, type=Path, metavar="FOLDER", help="an existing folder; see below")
    add("--limit", type=positive, metavar="N", help="the first N traces of each file")
    add("--dtype", default="auto", help="as for vLLM: auto, float32, bfloat16, ...")
    add(
        "--num-choices",
        type=positive,
        default=NUM_CHOICES,
        metavar="K",
        help=f"tokens a position (default: {NUM_CHOICES}, what hybrid takes)",
    )
    add(
        "--chunk-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="tokens of a forward pass (default: 1024); the logits of all of them are kept twice "
        "or more in float32, so lower it where memory is short",
    )
    add(
        "--kv-cache-gib",
        type=float,
        metavar="G",
        help="of the engine (default: 1 on CPU, vLLM's choice elsewhere)",
    )
    return parser


def _length(trace: Trace) -> int:
    return len(trace.prompt) + len(trace.output)


def _max_positions(model: str) -> int | None:
    """The positions that the model's config.json allows; None if it does not tell."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return config.get("max_position_embeddings") or config.get("n_positions")


def _check(files: Sequence[TraceFile], out: Path, max_positions: int | None) -> None:
    """Raise TraceError if the choices of these traces cannot be recorded there."""
    if not out.is_dir():
        raise TraceError(f"--out: there is no folder {out}")
    names = [file.path.stem for file in files]
    if len(set(names)) < len(names):
        raise TraceError("--traces: two files have the same name, and so would their choices")
    for file in files:
        check_output(_path(file, out), TraceError)
        ids = [trace.id for trace in file.traces]
        if "" in ids or len(set(ids)) < len(ids):
            raise TraceError(f"{file.path}: every line needs an `id` of its own")
        for trace in file.traces:
            if max_positions and _length(trace) >= max_positions:
                raise TraceError(
                    f"{file.path}: trace {trace.id!r} has {_length(trace)} tokens; the model has "
                    f"{max_positions} positions, and one must be left; remove the line"
                )


def _path(file: TraceFile, folder: Path) -> Path:
    """The file for the choices of these traces."""
    return folder / f"{file.path.stem}{SUFFIX}"


class _Recorder:
    """Plain vLLM, which tells the likeliest tokens at the positions of a trace's answer."""

    def __init__(self, engine_args: dict[str, Any], num_choices: int) -> None:
        from vllm import LLM, SamplingParams

        self._llm = LLM(**engine_args)
        self._params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=num_choices,
            detokenize=False,
            flat_logprobs=True,
        )
        self._num_choices = num_choices
        self.dtype = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")

    def __call__(self, trace: Trace) -> AnswerChoices:
        tokens = np.concatenate((trace.prompt, trace.output)).tolist()
        prompt: Any = {"prompt_token_ids": tokens}
        (output,) = self._llm.generate(prompt, self._params, use_tqdm=False)
        # A position has the token that stands there, and then the likeliest ones.
        logprobs = output.prompt_logprobs
        width = 1 + self._num_choices
        first = logprobs.start_indices[len(trace.prompt)]
        shape = (len(trace.output), width)
        listed = np.array(logprobs.token_ids[first:], np.int32).reshape(shape)[:, 1:]
        values = np.array(logprobs.logprobs[first:], np.float32).reshape(shape)[:, 1:]
        return AnswerChoices(listed, (values[:, :1] - values).astype(np.float16))

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.llm_engine.engine_core.shutdown()


def _recorder(options: argparse.Namespace, length: int) -> _Recorder:
    """An engine for traces of up to `length` tokens. One request at a time is deterministic."""
    return _Recorder(
        dict(
            model=str(options.model),
            dtype=options.dtype,
            max_model_len=length + 1,
            max_num_seqs=1,
            max_num_batched_tokens=options.chunk_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_logprobs=options.num_choices,
            kv_cache_memory_bytes=kv_cache_bytes(options),
            disable_log_stats=True,
        ),
        options.num_choices,
    )


def _record_all(
    traces: Sequence[Trace], record: Callable[[Trace], AnswerChoices], advance: Callable[[int], Any]
) -> Iterator[AnswerChoices]:
    for trace in traces:
        yield record(trace)
        advance(_length(trace))
