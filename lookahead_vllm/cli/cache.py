"""Build a cache file from documents or past answers, or print the contents of one."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from tqdm import tqdm

from lookahead_vllm.cli.arguments import check_output, positive
from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.warming import TextError, learn, read_texts
from lookahead_vllm.draft.options import LookaheadOptions, OptionError
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.kept_file import RefusedFileError

MAX_NAMESPACES = 20
"""The number of namespaces that `info` lists."""

EPILOG = """\
examples:
  lookahead-vllm cache build --model MODEL --texts manual.txt answers.jsonl --out warm.cache
  vllm serve MODEL --speculative-config '{"method": "lookahead", "cache_path": "warm.cache"}'
  lookahead-vllm cache info warm.cache

The exit status is 0, 2 for wrong options, texts or files, 130 after Ctrl-C.
"""

BUILD_EPILOG = """\
texts:
  FILE.jsonl, where every line is one of
    {"text": "a document"}
    {"prompt": "a question", "response": "an answer"}   (or "completion" for "response")
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt_token_ids": [1, 9690], "output_token_ids": [504]}   (the prompt may be missing)
  Any other file is one document, in UTF-8.
  Documents and answers are learned like a model's answers. A prompt only gives the context of its
  answer: its n-grams are not stored. List the least important files first: a full cache drops the
  oldest n-grams.

requirements:
  the model      A cache file belongs to one tokenizer; servers with another refuse it.
  --max-nodes    must equal the server's max_nodes, or the server refuses the file.
  --namespace    must equal the requests' lookahead_namespace. Without it, the n-grams serve
                 requests without a namespace, a cache_salt and a LoRA adapter.

The file holds hashes of the texts and the tokens that followed them: protect it like the texts.

example:
  lookahead-vllm cache build --model MODEL --texts manual.txt answers.jsonl --out warm.cache

The exit status is 0, 2 for wrong options, texts or files, 130 after Ctrl-C. Unless it is 0,
nothing was written.
"""


def parser() -> argparse.ArgumentParser:
    """The command line; `run` and `error` of the parsed options belong to the chosen command."""
    raw = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(
        prog="lookahead-vllm cache", description=__doc__, epilog=EPILOG, formatter_class=raw
    )
    commands = result.add_subparsers(metavar="COMMAND", required=True)
    line = "learn texts into a cache file, so that a server starts warm"
    build = commands.add_parser(
        "build", help=line, description=line, epilog=BUILD_EPILOG, formatter_class=raw
    )
    build.set_defaults(run=build_cache, error=build.error)
    add = build.add_argument
    add("--model", required=True, help="as for vllm serve; its tokenizer is loaded")
    add("--texts", nargs="+", type=Path, required=True, metavar="FILE", help="see below")
    add("--out", type=Path, required=True, metavar="FILE", help="the cache file to write")
    add("--add", action="store_true", help="extend the file of --out, which must exist")
    add("--namespace", default="", metavar="NAME", help="which requests it serves; see below")
    add(
        "--max-nodes",
        type=positive,
        metavar="N",
        help=f"capacity in n-grams (default: {LookaheadOptions.max_nodes})",
    )
    line = "print the contents of a cache file: n-grams, namespaces, tokenizer"
    info = commands.add_parser("info", help=line, description=line)
    info.set_defaults(run=print_info, error=info.error)
    info.add_argument("out", type=Path, metavar="FILE", help="the cache file")
    return result


class UsageError(ValueError):
    """One sentence: what is wrong with the command line."""


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model, a folder or a name on the hub; UsageError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        raise UsageError(
            f"--model: no tokenizer could be loaded from {model}; write a folder that holds a "
            "tokenizer.json, or the name of a model that vllm serve finds"
        ) from None


def full_namespace(name: str) -> str:
    """The engine's namespace of requests with this name, no cache salt and no LoRA adapter."""
    if not name:
        return ""
    try:
        from lookahead_vllm.engine.request_options import shared_namespace
    except ImportError as error:
        raise UsageError(f"--namespace needs vLLM, which cannot be imported: {error}") from None
    return shared_namespace("namespace", None, None, name) or ""


def print_info(options: argparse.Namespace) -> None:
    """`cache info`."""
    path: Path = options.out
    header = cache_file.read_header(path)
    arrays, facts = cache_file.load(path)
    pruned = restored(arrays, facts).trie.num_pruned
    sizes = cache_file.sizes_of_spaces(arrays)
    total, capacity = sum(sizes.values()), len(arrays["edges"])
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, intact")
    print(f"made        {_date(header.created)}, by lookahead-vllm {header.release}")
    print(f"tokenizer   {header.tokenizer}")
    print(
        f"n-grams     {total} of at most {capacity} ({total / capacity:.1%}); "
        f"{pruned} were pruned so far"
    )
    print(f"namespaces  {header.namespaces}")
    namespaces = sorted(facts["namespaces"].items(), key=lambda item: -sizes.get(item[1], 0))
    for digest, space in namespaces[:MAX_NAMESPACES]:
        name = "   (the one without a name)" if digest == digest_of("") else ""
        print(f"  {digest}  {sizes.get(space, 0):>10} n-grams{name}")
    if len(namespaces) > MAX_NAMESPACES:
        print(f"  and {len(namespaces) - MAX_NAMESPACES} smaller ones")


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at no valid date"


def restored(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> NGramTrieProposer:
    """A proposer with the contents of a cache file, as `cache.file.load` returns them.

    Raises
    ------
    RefusedFileError
        They do not fit this release.
    """
    if "edges" not in arrays:
        raise RefusedFileError("it holds no n-grams of lookahead: its edges are missing")
    options = {"max_nodes": len(arrays["edges"]), "share": facts.get("share", "namespace")}
    try:
        proposer = NGramTrieProposer(LookaheadOptions.from_dict(options))
        proposer.restore(arrays, facts)
        return proposer
    except OptionError as error:
        raise RefusedFileError(
            f"it was made with options that this release of lookahead refuses: {error}"
        ) from None
    except ValueError as error:
        raise RefusedFileError(str(error)) from None


def make_proposer(options: argparse.Namespace, fingerprint: str) -> NGramTrieProposer:
    """An empty proposer, or with --add one with the contents of the file.

    Raises
    ------
    UsageError, RefusedFileError, OptionError, OSError
    """
    if options.add:
        arrays, facts = cache_file.load(options.out, fingerprint)
        proposer = restored(arrays, facts)
        capacity = len(arrays["edges"])
        if options.max_nodes not in (None, capacity):
            raise UsageError(
                f"--max-nodes: {options.out} has {capacity}, which --add keeps; leave it out"
            )
    else:
        given = {} if options.max_nodes is None else {"max_nodes": options.max_nodes}
        proposer = NGramTrieProposer(LookaheadOptions.from_dict(given))
    # Each prompt at once: here no step waits, and none begins.
    proposer.insertion.seconds = math.inf
    return proposer


def check_paths(options: argparse.Namespace) -> None:
    """Raise UsageError if a text cannot be read or the file cannot be written."""
    try:
        check_output(options.out.resolve(), UsageError)
    except UsageError as error:
        raise UsageError(f"--out: {error}") from None
    if options.out.exists() and not options.add:
        raise UsageError(f"--out: {options.out} exists; write --add to go on from it, or remove it")
    for path in options.texts:
        if not path.is_file():
            raise UsageError(f"--texts: there is no file {path}")


def build_cache(options: argparse.Namespace) -> None:
    """`cache build`: learn the texts and write the file."""
    check_paths(options)
    namespace = full_namespace(options.namespace)
    tokenizer = load_tokenizer(options.model)
    fingerprint = cache_file.fingerprint(tokenizer.get_vocab())
    proposer = make_proposer(options, fingerprint)
    start, pruned_before = time.perf_counter(), proposer.trie.num_pruned
    num_texts, num_tokens = learn_files(proposer, options.texts, tokenizer, namespace)
    arrays, facts = proposer.snapshot()
    size = cache_file.save(options.out.resolve(), arrays, facts, fingerprint)
    held, capacity = cache_file.count_ngrams(arrays), len(arrays["edges"])
    print(
        f"{options.out}: {num_tokens} tokens of {num_texts} texts learned in "
        f"{time.perf_counter() - start:.1f} s; it holds {held} n-grams of at most {capacity} "
        f"({held / capacity:.1%}), {size / 1e6:.1f} MB"
    )
    pruned = proposer.trie.num_pruned - pruned_before
    if held + pruned > capacity:
        print(
            f"{pruned} n-grams were pruned, for there were more than --max-nodes; a larger "
            "--max-nodes, and the same max_nodes for the server, keeps more of them"
        )


def learn_files(
    proposer: NGramTrieProposer, paths: Sequence[Path], tokenizer: Any, namespace: str
) -> tuple[int, int]:
    """Learn all texts, with a progress bar; returns how many texts and tokens were learned."""
    num_texts, num_tokens = 0, 0
    for path in paths:
        for text in tqdm(read_texts(path, tokenizer), path.name, unit=" texts", disable=None):
            learn(proposer, text, namespace)
            num_texts += bool(text.answer)
            num_tokens += len(text.answer)
    return num_texts, num_tokens


def main(argv: Sequence[str]) -> int:
    """Run the command; `--help` explains the exit status."""
    options = parser().parse_args(argv)
    try:
        options.run(options)
    except RefusedFileError as error:
        options.error(f"{options.out}: {error}")
    except OSError as error:
        options.error(f"{error.filename or options.out}: {error.strerror or error}")
    except (UsageError, OptionError, TextError) as error:
        options.error(str(error))
    return 0
