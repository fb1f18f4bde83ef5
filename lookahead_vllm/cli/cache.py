"""Build a cache file from documents or past answers, so that a server starts warm."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from tqdm import tqdm

from lookahead_vllm.cli.arguments import check_output, first_line, positive
from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.warming import Renderer, TextError, check_texts, learn, read_texts
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.kept_file import RefusedFileError
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.request import shared_namespace
from lookahead_vllm.options.server import LookaheadOptions

if TYPE_CHECKING:
    from lookahead_vllm.cli.server_renderer import ServerRenderer

EPILOG = """\
texts:
  FILE.jsonl, where every line is one of
    {"text": "a document"}
    {"prompt": "a question", "response": "an answer"}   (or "completion" for "response")
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
        as in requests to a server's chat endpoint: with tool calls, content in parts, "tools".
        In a log with a line for each request, only the last one of each conversation counts
    {"prompt_token_ids": [1, 9690], "output_token_ids": [504]}   (the prompt may be missing)
  Any other file is one document, in UTF-8.
  Documents and answers are learned like a model's answers. A prompt only gives the context of its
  answer: its n-grams are not stored. A chat is rendered by vLLM; a line with a chat that it would
  refuse is named and skipped. List the least important files first: a full cache drops the oldest
  n-grams.

requirements:
  the model      A cache file belongs to one tokenizer; servers with another refuse it.
  --max-nodes    must equal the server's max_nodes, or the server refuses the file.
  --namespace    must equal the requests' lookahead_namespace. Without it, the n-grams serve
                 requests without a namespace, a cache_salt and a LoRA adapter.

The file holds hashes of the texts and the tokens that followed them: protect it like the texts.

example:
  lookahead-vllm cache build --model MODEL --texts manual.txt answers.jsonl --out warm.cache
  vllm serve MODEL --speculative-config '{"method": "lookahead", "cache_path": "warm.cache"}'

The exit status is 0, 2 for wrong options, texts or files, 130 after Ctrl-C. Unless it is 0,
nothing was written.
"""


def parser() -> argparse.ArgumentParser:
    """The command line; `build` is the only thing to do with a cache file."""
    result = argparse.ArgumentParser(
        prog="lookahead-vllm cache build",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("command", choices=["build"], help=argparse.SUPPRESS)
    add = result.add_argument
    add("--model", required=True, help="as for vllm serve; only its tokenizer is loaded")
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
    return result


def check_model(model: str) -> None:
    """Raise OptionError if there is no such model; the hub is asked once, while vLLM asks often."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if Path(model).exists():
            return
        names = ("config.json", "params.json")  # the second one is Mistral's
        cached = any(isinstance(try_to_load_from_cache(model, name), str) for name in names)
        found = cached or HfApi().repo_exists(model)
        reason = "the hub has no such model"
    except Exception as error:  # no name of the hub's, no network
        found, reason = False, first_line(error)
    if not found:
        raise OptionError(
            f"--model: {model} is no folder, and no model of the hub was found ({reason}); write a "
            "folder that holds a config.json, or the name of a model that vllm serve finds"
        )


def load_renderer(model: str) -> ServerRenderer:
    """The renderer of a model; OptionError if vLLM cannot load it."""
    try:
        from lookahead_vllm.cli.server_renderer import ServerRenderer, first_fault
    except ImportError as error:
        raise OptionError(f"--model needs vLLM, which cannot be imported: {error}") from None
    try:
        return ServerRenderer(model)
    except Exception as error:
        raise OptionError(
            f"--model: vLLM cannot load the configuration and the tokenizer of {model}: "
            f"{first_fault(error)}"
        ) from None


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
    OptionError, RefusedFileError, OSError
    """
    if options.add:
        arrays, facts = cache_file.load(options.out, fingerprint)
        capacity = len(arrays.get("edges", ()))
        if options.max_nodes not in (None, capacity):
            raise OptionError(
                f"--max-nodes: {options.out} has {capacity}, which --add keeps; leave it out"
            )
        proposer = restored(arrays, facts)
    else:
        proposer = NGramTrieProposer(LookaheadOptions.from_dict({"max_nodes": options.max_nodes}))
    # Each prompt at once: here no step waits, and none begins.
    proposer.insertion.seconds = math.inf
    return proposer


def check_arguments(options: argparse.Namespace) -> None:
    """Check what can be checked before anything is loaded or compiled.

    Raises
    ------
    OptionError, RefusedFileError, OSError
    """
    try:
        check_output(options.out.resolve(), OptionError)
    except OptionError as error:
        raise OptionError(f"--out: {error}") from None
    if options.add:
        cache_file.read_about(options.out)
    elif options.out.exists():
        raise OptionError(
            f"--out: {options.out} exists; write --add to go on from it, or remove it"
        )
    else:
        LookaheadOptions.from_dict({"max_nodes": options.max_nodes})  # refuses a wrong number
    for path in options.texts:
        if not path.is_file():
            raise OptionError(f"--texts: there is no file {path}")
    check_model(options.model)


def build_cache(options: argparse.Namespace) -> None:
    """`cache build`: learn the texts and write the file."""
    check_arguments(options)
    largest_ids = {path: check_texts(path) for path in options.texts}
    renderer = load_renderer(options.model)
    vocabulary = renderer.tokenizer.get_vocab()
    last = max(vocabulary.values())
    for path, largest in largest_ids.items():
        if largest > last:
            raise OptionError(
                f"--texts: {path} has token {largest}, and the tokenizer ends at {last}"
            )
    fingerprint = cache_file.fingerprint(vocabulary)
    proposer = make_proposer(options, fingerprint)
    start, pruned_before = time.perf_counter(), proposer.trie.num_pruned
    share = proposer.options.share
    if share == "none":
        raise OptionError(f"--add: {options.out} is of a server whose requests share nothing")
    namespace = shared_namespace(share, None, None, options.namespace)
    num_texts, num_tokens, num_skipped = learn_files(proposer, options.texts, renderer, namespace)
    arrays, facts = proposer.snapshot()
    size = cache_file.save(options.out.resolve(), arrays, facts, fingerprint)
    held, capacity = cache_file.count_ngrams(arrays), len(arrays["edges"])
    skipped = f" (skipped lines: {num_skipped})" if num_skipped else ""
    print(
        f"{options.out}: {num_tokens} tokens of {num_texts} texts learned in "
        f"{time.perf_counter() - start:.1f} s{skipped}; it holds {held} n-grams of at most "
        f"{capacity} ({held / capacity:.1%}), {size / 1e6:.1f} MB"
    )
    pruned = proposer.trie.num_pruned - pruned_before
    if held + pruned > capacity:
        print(
            f"{pruned} n-grams were pruned, for there were more than --max-nodes; a larger "
            "--max-nodes, and the same max_nodes for the server, keeps more of them"
        )


def learn_files(
    proposer: NGramTrieProposer, paths: Sequence[Path], renderer: Renderer, namespace: str | None
) -> tuple[int, int, int]:
    """Learn all texts, with a progress bar; names the lines that a server would refuse.

    Returns how many texts and tokens were learned, and how many lines were skipped.
    """
    num_texts, num_tokens, num_skipped = 0, 0, 0

    def skip(sentence: str) -> None:
        nonlocal num_skipped
        num_skipped += 1
        tqdm.write(f"skipped: {sentence}", file=sys.stderr)

    for path in paths:
        for text in tqdm(read_texts(path, renderer, skip), path.name, unit=" texts", disable=None):
            learn(proposer, text, namespace)
            num_texts += bool(text.answer)
            num_tokens += len(text.answer)
    return num_texts, num_tokens, num_skipped


def main(argv: Sequence[str]) -> int:
    """Run the command; `--help` explains the exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        build_cache(options)
    except RefusedFileError as error:
        arguments.error(f"{options.out}: {error}")
    except OSError as error:
        arguments.error(f"{error.filename or options.out}: {error.strerror or error}")
    except (OptionError, TextError) as error:
        arguments.error(str(error))
    return 0
