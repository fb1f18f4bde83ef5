"""Make a file of prompts with dictated answers for `bench.py --target-guided`."""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.prompt_files.copying import (
    FILE_PIECES,
    TURNS,
    Chat,
    code_of,
    conversations,
    edits,
    second_answers,
)
from benchmarks.prompt_files.line import Line
from benchmarks.prompt_files.long_contexts import long_contexts
from lookahead_vllm.cli.arguments import check_output, positive
from lookahead_vllm.json_lines import are_token_ids, read_json_lines

EPILOG = f"""\
examples:
  python scripts/make_prompts.py copying --model .cache/models/SmolLM2-135M-Instruct \\
      --code humaneval_reference.jsonl --answers llma_rag_reference.jsonl --out copying.jsonl
  python scripts/bench.py --model .cache/models/SmolLM2-135M-Instruct --prompts copying.jsonl \\
      --target-guided --prefix-caching --methods none,ngram,suffix,lookahead \\
      --config 'with_reference={{"method":"lookahead"}}' --references with_reference --turns 3

  python scripts/make_prompts.py long --recorded spec_bench_dev.jsonl --tokens 4096 \\
      --out long-4096.jsonl
  python scripts/bench.py --model configs/shapes/smollm2-135m-32k --prompts long-4096.jsonl \\
      --target-guided --engine-arg load_format=dummy --engine-arg skip_tokenizer_init=true \\
      --batch-sizes 1,8 --methods none,lookahead

copying:
  rename, delete, insert  the prompt has a piece of code and asks for an edit; the answer is the
                          whole code after it, the reference the code before it
  turn 1 to {TURNS}             conversations over a file: a turn's prompt is the last turn's with
                          its answer and a further instruction, its answer the whole file after
                          an edit, its reference the file before; every second turn the file
                          grows. All first turns come before all second ones: with batches of
                          at most --count over bench.py's --turns requests, a turn starts after
                          the one before it has its answer
  second answer           recorded requests; the reference is an earlier answer, which is the
                          recorded one with some tokens replaced or left out, and which the
                          prompt does not have
  --count prompts are made of each kind of edit and of second answers, and as many conversations.
  Choose for bench.py a number of --turns that divides it, and a --limit that takes equally many of
  each category, so that every conversation stays whole.

long:
  recorded requests behind a context of other recorded requests and answers, up to --tokens tokens.

A line has prompt_token_ids, output_token_ids, category and, when copying, reference_token_ids.
The same options give the same file.
"""


RECORDED = ("prompt_token_ids", "output_token_ids")


class InputError(ValueError):
    """A file cannot be used; the message names it."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    loads = result.add_subparsers(dest="load", required=True)
    copying = loads.add_parser("copying", help="answers that copy: edits, conversations")
    copying.add_argument("--model", required=True, metavar="DIR", help="gives the tokenizer")
    copying.add_argument(
        "--code", type=Path, required=True, metavar="FILE", help="recorded answers that are code"
    )
    copying.add_argument(
        "--answers", type=Path, metavar="FILE", help="recorded requests to answer a second time"
    )
    copying.add_argument("--count", type=positive, default=12, help="of each kind (default: 12)")
    long = loads.add_parser("long", help="long contexts")
    long.add_argument("--recorded", type=Path, required=True, metavar="FILE", help="requests")
    long.add_argument("--tokens", type=positive, default=4096, help="of a prompt (default: 4096)")
    long.add_argument(
        "--shared", action="store_true", help="all prompts begin with the same context"
    )
    long.add_argument("--count", type=positive, default=24, help="prompts (default: 24)")
    for each in (copying, long):
        each.add_argument("--seed", type=int, default=0, help="decides the edits (default: 0)")
        each.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl", help="the file")
    return result


def read(path: Path) -> list[Line]:
    """The recorded requests of a file; InputError if a line has no tokens of its answer."""
    lines: list[Line] = []
    for number, line in read_json_lines(path, InputError):
        if not isinstance(line, dict) or not all(are_token_ids(line.get(key)) for key in RECORDED):
            raise InputError(
                f"{path}, line {number}: `prompt_token_ids` and `output_token_ids` are expected"
            )
        lines.append(line)
    if not lines:
        raise InputError(f"{path} is empty: one JSON object a line is expected")
    return lines


def copying_lines(options: argparse.Namespace) -> Iterator[Line]:
    """All lines that copy."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    chat = Chat(tokenizer)
    rng = random.Random(options.seed)
    codes = [code_of(chat.text(trace["output_token_ids"])) for trace in read(options.code)]
    codes = [code for code in codes if code.strip()]
    if len(codes) < FILE_PIECES:
        raise InputError(f"{options.code}: at least {FILE_PIECES} answers with code are expected")
    yield from edits(chat, codes, options.count, rng)
    yield from conversations(chat, codes, options.count, rng)
    if options.answers:
        answers = read(options.answers)
        yield from second_answers(answers, len(tokenizer), options.count, rng)


def make(options: argparse.Namespace) -> Iterator[Line]:
    """The lines of the file."""
    if options.load == "copying":
        return copying_lines(options)
    rng = random.Random(options.seed)
    recorded = read(options.recorded)
    return long_contexts(recorded, options.count, options.tokens, options.shared, rng)


def main(argv: Sequence[str]) -> int:
    """Write the file, and print the number of prompts by category."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        check_output(options.out, InputError)
        lines = list(tqdm(make(options), unit=" prompts"))
    except ValueError as error:
        arguments.error(str(error))
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = Counter(line["category"] for line in lines)
    longest = max((len(line["prompt_token_ids"]) for line in lines), default=0)
    print(
        f"{options.out}: {', '.join(f'{n} {category}' for category, n in counts.items())}; "
        f"the longest prompt has {longest} tokens",
        file=sys.stderr,
    )
    return 0
