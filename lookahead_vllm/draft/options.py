"""The options of lookahead decoding, named as in the papers and checked at start-up."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lookahead_vllm.draft.allowed import Allowed, check_names
from lookahead_vllm.draft.allowed import OptionError as OptionError
from lookahead_vllm.draft.registry import HAVE_WINDOW, PROPOSERS
from lookahead_vllm.draft.window.shape import (
    MAX_NGRAM_SIZE,
    MAX_WINDOW_SIZE,
    PAPER_NGRAM_SIZE,
    WindowShape,
    paper_window_size,
)

ATTENTIONS = ("auto", "triton", "xformers")
SHARES = ("none", "namespace", "all")
CLIENT_OPTIONS = ("all", "no_namespaces", "none")
SHARE_SCHEMES = ("redis://", "rediss://", "unix://")

MAX_DECODING_LENGTH = 128

AUTO_DECODING_LENGTH = 64
"""The most nodes of a tree unless the user sets another number. The budget sends only those that
pay; if a text is copied, many do."""

AUTO_RECURRENT_LENGTH = 16
"""The same for a model with recurrent layers, which keeps a state for each node."""

FEW_REQUESTS, AUTO_RECURRENT_LENGTH_OF_MANY = 16, 4
"""The same where more requests than these may run. Then states would take the memory of others:
1.8 GiB a request with 16 nodes, 0.5 with 4 (Nemotron-H 8B, docs/benchmarks.md)."""

MIN_TOKENS_FOR_HYBRID = 64
"""The critical decoding length from which "auto" is "hybrid": its additional sources give a fifth
more tokens a step with 64 nodes, and no gain with few."""

MAX_PARALLEL = 8

CHAIN_LENGTH = "num_speculative_tokens"
"""The key of K in a drafter's config; vLLM fills it in if the user leaves it out."""

NODES_PER_TOKEN, BYTES_PER_NODE = 20, 16
"""Of texts: a token has up to 8 n-grams, and a table that is half full loses few of them."""
MEMORY_SHARE = 32
"""The texts take at most this part of the machine's memory."""

WEEK_SECONDS = 7 * 24 * 3600


def _words(default: str, words: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"allowed": Allowed(words)})


def _number(default: Any, low: int, high: int, kind: str = "a whole number") -> Any:
    """A number, or "auto" if that is the default."""
    words = (default,) if default == "auto" else ()
    return field(default=default, metadata={"allowed": Allowed(words, (low, high), kind)})


def _text(kind: str, instead: Any) -> Any:
    """A text of this kind; `instead` is recommended in place of a wrong one."""
    return field(default=None, metadata={"allowed": Allowed(kind=kind), "instead": instead})


@dataclass(frozen=True)
class LookaheadOptions:
    """The options of lookahead decoding, described in docs/configuration.md.

    `from_dict` checks them.

    Attributes
    ----------
    num_speculative_tokens : "auto" or int
        The decoding length: the maximum number of nodes of one draft tree. "auto": 64, 16 for a
        model with recurrent layers; for "jacobi_window" the nodes of both its branches.
    branch_length : int
        The maximum length of a branch below the root, in tokens.
    max_nodes : int
        The capacity of the trie in n-grams of 16 bytes.
    max_text_nodes : "auto" or int
        The same for the texts of requests, beside it; 0: they share `max_nodes`. "auto": for all
        that an engine can read at a time, within a share of the machine's memory.
    proposer : "auto" or str
        A key of `registry.PROPOSERS`. "auto": "hybrid" where tokens in a step are nearly free, else
        "ngram_trie".
    budget : "auto" or int
        "auto": each step sends only the nodes that pay for themselves. A number: up to that many
        for each request, whatever they cost.
    window_size, ngram_size : "auto" or int
        W and N of the lookahead branch; W = 0 disables it. "auto": W by the size of the model, as
        in Lookahead Decoding (ICML 2024), Table 4, as far as the nodes suffice.
    drafter : mapping or None
        vLLM's speculative config of a trained drafter, whose chain and alternatives grow into the
        same tree. A path P alone is {"model": P}.
    attention : "auto", "triton" or "xformers"
        What computes trees on a GPU. "auto": Triton, and FlashAttention 3 the contexts of a graph.
    parallel : int
        Replicas of the model that verify one step together, each a part of the nodes.
        Source: Lookahead Decoding (ICML 2024), section 3.4.
    share : "none", "namespace" or "all"
        Which requests learn from each other's answers.
    cache_path, cache_interval : str or None, int or float
        The file that keeps the cache for the next start; seconds between two saves, 0 for none
        before the end.
    share_with, share_messages : str or None, int
        The server through which replicas of this engine learn from each other's answers; the most
        messages that it keeps of a namespace.
    client_options : "all", "no_namespaces" or "none"
        Which options of requests are not ignored.
    """

    num_speculative_tokens: str | int = _number("auto", 1, MAX_DECODING_LENGTH)
    branch_length: int = _number(64, 1, 64)
    max_nodes: int = _number(4_000_000, 1024, 2**30 - 1)
    max_text_nodes: str | int = _number("auto", 0, 2**30 - 1)
    proposer: str = "auto"
    budget: str | int = _number("auto", 1, MAX_DECODING_LENGTH)
    window_size: str | int = _number("auto", 0, MAX_WINDOW_SIZE)
    ngram_size: int = _number(PAPER_NGRAM_SIZE, 2, MAX_NGRAM_SIZE)
    drafter: Mapping[str, Any] | None = _text("a speculative config of vLLM's", {"method": "mtp"})
    attention: Literal["auto", "triton", "xformers"] = _words("auto", ATTENTIONS)
    parallel: int = _number(1, 1, MAX_PARALLEL)
    share: str = _words("namespace", SHARES)
    cache_path: str | None = _text("the path of a file", "lookahead.cache")
    cache_interval: float = _number(60, 0, WEEK_SECONDS, "a number of seconds")
    share_with: str | None = _text(
        "the URL of a Redis or Valkey server", "redis://localhost:6379/0"
    )
    share_messages: int = _number(4_000, 1, 10_000_000)
    client_options: str = _words("all", CLIENT_OPTIONS)

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> LookaheadOptions:
        """Make options of `given`; an option that is missing or None gets its default.

        Raises
        ------
        OptionError
            A key is unknown, a value has a wrong type or is out of range, two contradict, or an
            option has no effect.
        """
        known = cls.__dataclass_fields__
        check_names(given, known)
        values: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
        for name, value in values.items():
            if name == "drafter" and isinstance(value, Mapping) and value:
                continue  # vLLM checks it
            instead = known[name].metadata.get("instead", known[name].default)
            allowed_values(name).check(name, value, instead)
        if isinstance(drafter := values.get("drafter"), str):
            values["drafter"] = {"model": drafter}
        options = cls(**values)
        options._check_length()
        options._check_comb()
        options._check_url()
        options._check_needs()
        return options

    def to_dict(self) -> dict[str, object]:
        """The options as plain values, which `from_dict` reads back."""
        return asdict(self)

    def with_checked_cache(self) -> LookaheadOptions:
        """Return these options with an absolute `cache_path`, after checking its directory.

        Raises
        ------
        OptionError
            The file could not be written there.
        """
        if self.cache_path is None:
            return self
        given = f"cache_path={self.cache_path!r} was given, but"
        path = Path(os.path.expanduser(self.cache_path)).resolve()
        if path.is_dir():
            raise OptionError(
                f"{given} that is a directory; write the path of a file in it, such as "
                f"{str(path / 'lookahead.cache')!r}"
            )
        if not path.parent.is_dir():
            raise OptionError(
                f"{given} there is no directory {str(path.parent)!r}; make it, or write the path "
                "of a file in one that exists"
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise OptionError(
                f"{given} this user may not write in {str(path.parent)!r}; allow it, or write the "
                "path of a file in another directory"
            )
        return replace(self, cache_path=str(path))

    def for_model(self, num_parameters: float) -> LookaheadOptions:
        """Replace "auto" in `window_size`, for a model of this size.

        W is the paper's, or the largest whose comb fits into half of a tree's nodes with the
        proposer "jacobi_window", into a quarter with "hybrid".
        """
        if self.proposer not in HAVE_WINDOW:
            return self
        size = self.window_size
        if size == "auto":
            sizes = range(paper_window_size(num_parameters) + 1)
            nodes = [WindowShape(size, self.ngram_size).nodes for size in sizes]
            size = max(s for s, n in zip(sizes, nodes, strict=True) if n <= self._max_comb_nodes)
        return replace(self, window_size=size)

    def at_most(self, nodes: int) -> LookaheadOptions:
        """Replace "auto" in `num_speculative_tokens` where there is room for only so many nodes.

        A window and a fixed budget keep as many as they need.
        """
        sizes = self.num_speculative_tokens, self.budget, self.window_size
        if self.proposer == "jacobi_window" or any(size != "auto" for size in sizes):
            return self
        return replace(self, num_speculative_tokens=max(1, min(nodes, AUTO_DECODING_LENGTH)))

    def for_step_cost(self, critical_decoding_length: int) -> LookaheadOptions:
        """Replace "auto" in `proposer`, by the number of tokens that are nearly free in a step.

        A `budget` that is a number replaces the critical decoding length: its nodes are sent
        whatever they cost.
        """
        if self.proposer != "auto":
            return self
        free = critical_decoding_length if self.budget == "auto" else int(self.budget)
        return replace(self, proposer="hybrid" if free >= MIN_TOKENS_FOR_HYBRID else "ngram_trie")

    def for_texts(self, num_tokens: int, num_bytes: int) -> LookaheadOptions:
        """Replace "auto" in `max_text_nodes`, for this many tokens of prompts, within a share of a
        machine's memory of `num_bytes`."""
        if self.max_text_nodes != "auto" or self.proposer == "jacobi_window":
            return self
        nodes = min(num_tokens * NODES_PER_TOKEN, num_bytes // MEMORY_SHARE // BYTES_PER_NODE)
        return replace(self, max_text_nodes=min(nodes, 2**30 - 1))

    @property
    def num_text_nodes(self) -> int:
        """`max_text_nodes`; "auto" counts as 0."""
        return 0 if self.max_text_nodes == "auto" else int(self.max_text_nodes)

    @property
    def chain_length(self) -> int:
        """K, the tokens that the trained drafter proposes after each step; 0 without a drafter."""
        return 0 if self.drafter is None else int(self.drafter[CHAIN_LENGTH])

    @property
    def max_nodes_per_tree(self) -> int:
        """The maximum number of nodes of one tree: `budget` if it is a number."""
        if self.budget != "auto":
            return int(self.budget)
        length = self.num_speculative_tokens
        return self._default_length() if length == "auto" else int(length)

    @property
    def decoding_length(self) -> int:
        """The number of draft tokens for which the engine has room, in each request and step."""
        length = self.num_speculative_tokens
        return self.max_nodes_per_tree if length == "auto" else int(length)

    @property
    def window(self) -> WindowShape:
        """W and N; `window_size` must not be "auto"."""
        return WindowShape(int(self.window_size), self.ngram_size)

    @property
    def _max_comb_nodes(self) -> int:
        """The maximum number of nodes of the comb if `window_size` is "auto"."""
        return self.max_nodes_per_tree // (4 if self.proposer == "hybrid" else 2)

    def _default_length(self) -> int:
        if self.proposer != "jacobi_window":
            return AUTO_DECODING_LENGTH
        size = paper_window_size(0) if self.window_size == "auto" else int(self.window_size)
        comb = WindowShape(size, self.ngram_size).nodes
        ngrams = max(1, size) * (self.ngram_size - 1)  # as many as the paper's: G is W
        return min(MAX_DECODING_LENGTH, comb + ngrams)

    def _check_length(self) -> None:
        length = self.num_speculative_tokens
        if "auto" not in (self.budget, length) and int(self.budget) > int(length):
            raise OptionError(
                f"budget={self.budget} was given, but it must be at most "
                f'num_speculative_tokens={length}; write "auto", or leave budget out'
            )

    def _check_url(self) -> None:
        if self.share_with is not None and not self.share_with.startswith(SHARE_SCHEMES):
            raise OptionError(  # without the URL, which may hold a password
                f"share_with was given, but it must begin with {', '.join(SHARE_SCHEMES)}; write "
                "for instance redis://localhost:6379/0"
            )

    def _check_needs(self) -> None:
        given = [
            option.name for option in fields(self) if getattr(self, option.name) != option.default
        ]
        for need in NEEDS:
            for name in given:
                if name in need.of and not need.is_met(self):
                    # Without its value: the URL of `share_with` may hold a password.
                    raise OptionError(
                        f"{name} was given, but it has no effect without {need.what}; "
                        f"{need.write}, or leave {name} out"
                    )

    def _check_comb(self) -> None:
        if self.proposer not in HAVE_WINDOW or self.window_size == "auto":
            return
        max_nodes = self.max_nodes_per_tree
        if self.window.nodes > max_nodes:
            name = "num_speculative_tokens" if self.budget == "auto" else "budget"
            raise OptionError(
                f"window_size={self.window_size} and ngram_size={self.ngram_size} were given, "
                f"but their {self.window.nodes} nodes are more than {name}={max_nodes}; "
                "leave window_size out"
            )


class Need(NamedTuple):
    """What some options have no effect without."""

    of: tuple[str, ...]
    what: str
    write: str
    is_met: Callable[[LookaheadOptions], bool]


NEEDS = (
    Need(
        ("window_size", "ngram_size"),
        "a window, which only the proposers 'hybrid' and 'jacobi_window' have",
        "write proposer='hybrid'",
        lambda options: options.proposer in HAVE_WINDOW,
    ),
    Need(
        (
            "branch_length",
            "max_nodes",
            "max_text_nodes",
            "drafter",
            "share",
            "cache_path",
            "share_with",
        ),
        "a trie, which the proposer 'jacobi_window' does not have",
        "leave proposer out",
        lambda options: options.proposer != "jacobi_window",
    ),
    Need(
        ("share_with",),
        "requests that learn from each other, and share='none' was given",
        "write share='namespace'",
        lambda options: options.share != "none",
    ),
    Need(
        ("cache_interval",),
        "a cache file",
        "give cache_path, too",
        lambda options: options.cache_path is not None,
    ),
    Need(
        ("share_messages",),
        "a server to share with",
        "give share_with, too",
        lambda options: options.share_with is not None,
    ),
)


def allowed_values(option: str) -> Allowed:
    """The values of an option, apart from what depends on other options."""
    if option == "proposer":
        return Allowed(("auto", *PROPOSERS))
    allowed: Allowed = LookaheadOptions.__dataclass_fields__[option].metadata["allowed"]
    return allowed
