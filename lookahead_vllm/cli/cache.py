"""Build a cache file from documents or past answers, so that a server starts warm."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.file import CacheFileError
from lookahead_vllm.draft.cache.report import describe
from lookahead_vllm.draft.cache.warming import TextError, learn, read_texts
from lookahead_vllm.draft.options import LookaheadOptions, OptionError
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer

EPILOG = """\
examples:
  python scripts/warm_cache.py --model MODEL --texts manual.txt answers.jsonl --out warm.cache
  vllm serve MODEL --speculative-config '{"method": "lookahead", "cache_path": "warm.cache"}'
  python scripts/warm_cache.py --info warm.cache --model MODEL

texts:
  FILE.jsonl, where every line is one of
    {"text": "a document"}
    {"prompt": "before it", "response": "an answer"}   (or "completion" for "response")
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt_token_ids": [1, 9690], "output_token_ids": [504]}   (the former may be missing)
  any other file is one document, in UTF-8.
  Documents and answers are learned as if the model had just said them. Prompts are only what they
  follow: nothing of a prompt is kept. Put first what matters least, for a full cache forgets the
  oldest first.

what has to fit:
  the model      the file belongs to its tokenizer, and no other one is served from it
  --max-nodes    must be what the server has as max_nodes, or the server refuses the file
  --namespace    must be what requests give as lookahead_namespace; without it the n-grams are for
                 requests that name none (and carry no cache_salt and no LoRA adapter)

The file holds hashes of texts, and the tokens that followed them: treat it like the texts. The
exit status is 0, 2 for wrong options, texts or files, 130 after Ctrl-C; then nothing was written.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--model", type=Path, metavar="DIR", help="the model's folder, for its tokenizer")
    add("--texts", nargs="+", type=Path, metavar="FILE", help="what to learn; see below")
    add("--out", type=Path, metavar="FILE", help="the cache file to write")
    add("--add", action="store_true", help="go on from what --out holds")
    add("--namespace", default="", metavar="NAME", help="whose requests it is for; see below")
    add(
        "--max-nodes",
        type=int,
        metavar="N",
        help=f"room for so many n-grams (default: {LookaheadOptions.max_nodes})",
    )
    add("--info", type=Path, metavar="FILE", help="print what a cache file holds, and leave")
    return result


class UsageError(ValueError):
    """One sentence: what is missing or too much on the command line."""


def load_tokenizer(model: Path) -> Any:
    """The tokenizer in the model's folder."""
    if not model.is_dir():
        raise UsageError(f"--model: there is no folder {model}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        raise UsageError(
            f"--model: no tokenizer could be loaded from {model}; does it hold a tokenizer.json?"
        ) from None


def full_namespace(name: str) -> str:
    """The namespace of requests that give this one, and neither a salt nor an adapter."""
    if not name:
        return ""
    try:
        from lookahead_vllm.engine.request_options import shared_namespace
    except ImportError as error:
        raise UsageError(f"--namespace needs vLLM, which cannot be imported: {error}") from None
    return shared_namespace("namespace", None, None, name) or ""


def info(options: argparse.Namespace) -> None:
    """Print what the file holds."""
    if options.model is None:
        print(describe(options.info))
        return
    tokenizer = load_tokenizer(options.model)
    vocabulary = tokenizer.get_vocab()
    fingerprint = cache_file.fingerprint(vocabulary)
    print(describe(options.info, fingerprint, max(vocabulary.values()) + 1, tokenizer.decode))


def begin(options: argparse.Namespace, tokenizer: str) -> NGramTrieProposer:
    """A proposer that knows what it should go on from."""
    if not options.add:
        given = {} if options.max_nodes is None else {"max_nodes": options.max_nodes}
        return NGramTrieProposer(LookaheadOptions.from_dict(given))
    arrays, facts = cache_file.load(options.out, tokenizer)
    capacity = len(arrays["edges"])
    if options.max_nodes not in (None, capacity):
        raise UsageError(
            f"--max-nodes: {options.out} has {capacity}, which --add keeps; leave it out"
        )
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=capacity))
    try:
        proposer.restore(arrays, facts)
    except ValueError as error:
        raise CacheFileError(str(error)) from None
    return proposer


def warm(options: argparse.Namespace) -> None:
    """Learn the texts and write the file."""
    for name in ("model", "texts", "out"):
        if getattr(options, name) is None:
            raise UsageError(f"--{name} is missing; --model, --texts and --out go together")
    if not options.out.parent.is_dir():
        raise UsageError(f"--out: there is no folder {options.out.parent}")
    if options.out.exists() and not options.add:
        raise UsageError(f"--out: {options.out} exists; write --add to go on from it, or remove it")
    for path in options.texts:
        if not path.is_file():
            raise UsageError(f"--texts: there is no file {path}")
    namespace = full_namespace(options.namespace)
    tokenizer = load_tokenizer(options.model)
    identity = cache_file.fingerprint(tokenizer.get_vocab())
    proposer = begin(options, identity)
    start, pruned, texts, tokens = time.perf_counter(), proposer.trie.num_pruned, 0, 0
    total = sum(path.stat().st_size for path in options.texts)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for path in options.texts:
            bar.set_description(path.name)
            for text in read_texts(path, tokenizer):
                learn(proposer, text, namespace, bar.update)
                texts, tokens = texts + bool(text.answer), tokens + len(text.answer)
    arrays, facts = proposer.snapshot()
    size = cache_file.save(options.out.resolve(), arrays, facts, identity)
    held, capacity = cache_file.count_ngrams(arrays), len(arrays["edges"])
    print(
        f"{options.out}: {tokens} tokens of {texts} texts learned in "
        f"{time.perf_counter() - start:.1f} s; it holds {held} n-grams of at most {capacity} "
        f"({held / capacity:.1%}), {size / 1e6:.1f} MB"
    )
    if held + (forgotten := proposer.trie.num_pruned - pruned) > capacity:
        print(
            f"{forgotten} n-grams were pruned, for there were more than --max-nodes; with a larger "
            "one, and the same max_nodes for the server, more of them stay"
        )


def main(argv: Sequence[str]) -> int:
    """Do what the command line says; the exit status is explained in `--help`."""
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        if options.info is None:
            warm(options)
        elif options.texts or options.out or options.add:
            raise UsageError("--info prints and leaves; give it alone, or with --model")
        else:
            info(options)
    except CacheFileError as error:
        arguments.error(f"{options.info or options.out}: {error}")
    except OSError as error:
        arguments.error(f"{error.filename or options.out}: {error.strerror or error}")
    except (UsageError, OptionError, TextError) as error:
        arguments.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    return 0
