"""Compare methods of speculative decoding in vLLM: tokens a second, over batch sizes."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.command_line import PROMPT_LINES, engine_parser, positives
from benchmarks.methods import KNOWN
from lookahead_vllm.cli.arguments import positive
from lookahead_vllm.simulation.proposers import key_value

EPILOG = f"""\
examples:
  python scripts/bench.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts prompts.jsonl --limit 48 --max-tokens 128 --batch-sizes 1,8 \\
      --methods none,ngram,suffix,lookahead --check-exact --json out.json

  over batch sizes, with ratios accurate to a few percent: the engines of a size take turns
      --batch-sizes 1,2,4,8,16,32,64 --limit 24,24,36,48,96,192,240 --turns 3,3,3,3,3,3,2

  a model of another size, without its weights, on recorded answers
      --model FOLDER_WITH_A_CONFIG --engine-arg load_format=dummy --target-guided \\
      --engine-arg skip_tokenizer_init=true

  plain vLLM with tensor parallelism beside lookahead with two replicas
      --methods none --config tp=null --engine-arg tp:tensor_parallel_size=2 \\
      --config 'replicas={{"method":"lookahead","parallel":2}}'

  the cost of drafts that are never right
      --methods none,lookahead --batch-sizes 1,8,32 --limit 24,96,192 --adversarial --turns 6

{PROMPT_LINES}

columns:
  full         the share of the time in which the batch was full: at the end only a few requests
               still run, so large batches need many prompts (--limit), at least twice the batch
               size in each turn
  tokens/s     emitted tokens over wall time, prefills included, start-up not
  ratio        tokens/s over plain vLLM's (`none`)
  steps        decode steps of a request, summed over the requests
  tokens/step  tokens that decode steps emitted over `steps`, drafted or not (the papers' EDL
               and S); plain vLLM has 1.00
  acceptance   vLLM's mean acceptance length: 1 + accepted draft tokens over the steps that
               had a draft
  drafted      draft tokens that were verified, over `steps`
  differing    prompts whose token ids differ from plain vLLM's at the same batch size
               (--check-exact; bfloat16 rounds a step of several tokens differently, so
               expect zero only with --dtype float32)

how it measures:
  Each method at each batch size has an engine of its own, in a process of its own, with cold
  drafters and no prefix caching; a method that fails is reported, and the others go on. The
  engine runs as vLLM starts it (its core in a separate process). All prompts are queued in
  file order, and `batch size` of them run at any time. Decoding is greedy and stops at the
  end of sequence. A warm-up with other content comes first.
  --turns N removes drift from the ratios, and needs no more starts: the engines of one batch
  size live at the same time, and take turns with one N-th of the prompts (every N-th line),
  in alternating order. Brackets span the turns, whose prompts differ. A second table has
  the means over the turns and their standard errors. Below it, a line for each other method says
  whether `lookahead` is ahead, level or behind (the 95% interval over the turns). All engines
  need memory at once, and each waiting engine takes 1 to 2 % of a core: the same for all methods,
  so that the ratios do not change.
  --one-engine saves starts: an engine for the largest batch size answers all of them, one after the
  other. Each has prompts of its own, and drafters keep what they learned from the others.
  --adversarial gives the model random weights close to zero, which takes the same time, and
  samples --max-tokens tokens for each prompt: all tokens are equally likely, so that a draft
  token is right with probability 1 over the size of the vocabulary.
  --references gives these methods the lines' `reference_token_ids`, texts from which an answer may
  copy (the request's `lookahead_reference`).
  --target-guided makes the recorded token (`output_token_ids`) the likeliest at every position: any
  model then gives the recorded answers, and accepts what the model that was recorded would have
  accepted. It works with random weights, too (--engine-arg load_format=dummy). LLMA, section 3.2.
  Lookahead's proposer "auto" is then "ngram_trie".
  On a CPU, plain vLLM is as users have it, on vLLM's first model runner; lookahead runs Model
  Runner V2. With LOOKAHEAD_VLLM_PLAIN_V2=1 in front of the command, plain vLLM's methods run V2
  too, as far as it has them.
  On CPU, Intel's OpenMP and tcmalloc are preloaded where they are found. Threads are bound as
  vLLM does by default, which leaves a core to its front end: on a machine with few cores,
  compare with --threads nobind.

The exit status is 0 if any run finished, 1 if none did, 2 for wrong options, 130 after Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = engine_parser(__doc__, EPILOG, ",".join(KNOWN))
    add = result.add_argument
    add("--batch-sizes", type=positives, default=[1], metavar="N,M", help="default: 1")
    add(
        "--limit",
        type=limits,
        default=[None],
        metavar="N[,M]",
        help="take N prompts, spread evenly over the categories; or one N for each batch size",
    )
    add(
        "--turns",
        type=limits,
        default=[1],
        metavar="N[,M]",
        help="turns of each engine (default: 1); or one N for each batch size",
    )
    add(
        "--one-engine",
        action="store_true",
        help="each method answers all batch sizes with one engine: it starts once, and remembers",
    )
    add("--adversarial", action="store_true", help="requests whose drafts are never right")
    add("--target-guided", action="store_true", help="the model gives the recorded answers")
    add(
        "--references",
        type=names,
        default=[],
        metavar="A,B",
        help="the methods, of lookahead, whose requests bring their references",
    )
    add(
        "--record",
        type=Path,
        metavar="OUT.jsonl",
        help="write the answers of the first run there, for `lookahead-vllm simulate`",
    )
    add(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="write 20 steps of each engine and batch size there, host and device, for "
        "https://ui.perfetto.dev: of a turn more, which is not measured",
    )
    add("--check-exact", action="store_true", help="compare every answer with plain vLLM's")
    add("--prefix-caching", action="store_true", help="let methods share the KV of equal prefixes")
    add(
        "--engine-arg",
        action="append",
        type=engine_arg,
        default=[],
        metavar="[METHOD:]KEY=VALUE",
        help="a further argument of `vllm.LLM`, for every method or for METHOD alone; repeatable",
    )
    return result


def engine_arg(text: str) -> tuple[str, Any]:
    """Parse `[METHOD:]KEY=VALUE`; the result's key keeps the method.

    A value that is not JSON is taken as a string.
    """
    method, separator, _ = text.partition("=")[0].rpartition(":")
    pair = key_value(text.removeprefix(method + separator))
    if pair is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, as in enforce_eager=true")
    key, value = pair
    return method + separator + key, value


def limits(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas: one for each batch size, or one for all."""
    return [positive(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
