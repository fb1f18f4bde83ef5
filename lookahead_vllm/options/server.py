"""The options of a server, named as in the papers and checked at start-up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lookahead_vllm.options.allowed import Allowed, OptionError, check_name
from lookahead_vllm.options.window import MAX_WINDOW_SIZE, WindowShape, paper_window_size

KEY = "lookahead"
"""The speculative method, and the key of the options in a request's `extra_args`."""

PROPOSERS = ("ngram_trie", "jacobi_window", "hybrid")
"""What `proposer` can name; `draft/proposers/registry.py` has their classes."""

HAVE_WINDOW = {"jacobi_window", "hybrid"}
"""Proposers with a lookahead branch, which need the model's choices."""

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

CHAIN_LENGTH = "num_speculative_tokens"
"""The key of K in a drafter's config; vLLM fills it in if the user leaves it out."""

ALLOWED = {
    "num_speculative_tokens": Allowed(("auto",), (1, MAX_DECODING_LENGTH)),
    "max_nodes": Allowed(numbers=(1024, 2**30 - 1)),
    "proposer": Allowed(("auto", *PROPOSERS)),
    "budget": Allowed(("auto",), (1, MAX_DECODING_LENGTH)),
    "window_size": Allowed(("auto",), (0, MAX_WINDOW_SIZE)),
    "drafter": Allowed(text="a speculative config of vLLM's", example={"method": "mtp"}),
    "attention": Allowed(("auto", "triton", "xformers")),
    "parallel": Allowed(numbers=(1, 8)),
    "share": Allowed(("none", "namespace", "all")),
    "cache_path": Allowed(text="the path of a file", example="lookahead.cache"),
    "share_with": Allowed(
        text="the URL of a Redis or Valkey server", example="redis://localhost:6379/0"
    ),
    "client_options": Allowed(("all", "no_namespaces", "none")),
}
"""The values of each option, apart from what depends on others."""

OF_THE_TRIE = ("max_nodes", "drafter", "share", "cache_path", "share_with")


@dataclass(frozen=True)
class LookaheadOptions:
    """The options of lookahead decoding, described in docs/configuration.md.

    `from_dict` checks them.
    """

    num_speculative_tokens: str | int = "auto"
    """The decoding length: the maximum number of nodes of one draft tree. "auto": 64, 16 or 4 for a
    model with recurrent layers; for "jacobi_window" the nodes of both its branches."""
    max_nodes: int = 4_000_000
    """The capacity of the trie in n-grams of answers, of 16 bytes."""
    proposer: str = "auto"
    """One of `PROPOSERS`. "auto": "hybrid" where tokens in a step are nearly free, else
    "ngram_trie"."""
    budget: str | int = "auto"
    """If "auto", each step sends only the nodes that pay for themselves. A number: up to that many
    for each request, whatever they cost."""
    window_size: str | int = "auto"
    """W of the lookahead branch; 0 disables it. "auto": by the size of the model, as in Lookahead
    Decoding (ICML 2024), Table 4, as far as the nodes suffice."""
    drafter: Mapping[str, Any] | None = None
    """vLLM's speculative config of a trained drafter, whose chain and alternatives grow into the
    same tree. A path P alone is {"model": P}."""
    attention: Literal["auto", "triton", "xformers"] = "auto"
    """What computes trees on a GPU. "auto": Triton, and FlashAttention 3 the contexts of a
    graph."""
    parallel: int = 1
    """Replicas of the model that verify one step together, each a part of the nodes.
    Source: Lookahead Decoding (ICML 2024), section 3.4."""
    share: str = "namespace"
    """Which requests learn from each other's answers."""
    cache_path: str | None = None
    """The file that keeps the trie for the next start."""
    share_with: str | None = None
    """The server through which engines of this model learn from each other's answers."""
    client_options: str = "all"
    """Which options of requests are not ignored."""

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> LookaheadOptions:
        """Make options of `given`; an option that is missing or None gets its default.

        Raises
        ------
        OptionError
            A key is unknown, a value has a wrong type or is out of range, two contradict, or an
            option has no effect.
        """
        values: dict[str, Any] = {}
        for name, value in given.items():
            check_name(name, ALLOWED)
            is_config = name == "drafter" and isinstance(value, Mapping) and value
            if value is not None and not is_config:  # vLLM checks the drafter's
                ALLOWED[name].check(name, value, getattr(cls, name))
            if value is not None:
                values[name] = value
        if isinstance(drafter := values.get("drafter"), str):
            values["drafter"] = {"model": drafter}
        options = cls(**values)
        options._check_nodes()
        options._check_needs()
        return options

    def with_checked_cache(self) -> LookaheadOptions:
        """Return these options with an absolute `cache_path`, after checking its directory.

        Raises
        ------
        OptionError
            The file could not be written there.
        """
        if self.cache_path is None:
            return self
        path = Path(os.path.expanduser(self.cache_path))
        try:
            path = path.resolve()
            with suppress(FileNotFoundError):
                path.stat()
            is_wrong = path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)
        except (OSError, RuntimeError, ValueError):  # such as a name that is too long
            is_wrong = True
        if is_wrong:
            raise OptionError(
                f"cache_path={self.cache_path!r} was given, but no file can be written as "
                f"{str(path)!r}; write the path of a file in a directory that exists and in which "
                "this user may write"
            )
        return replace(self, cache_path=str(path))

    def for_model(self, num_parameters: float) -> LookaheadOptions:
        """Replace "auto" in `window_size`, for a model of this size.

        W is the paper's, or the largest whose comb fits into half of a tree's nodes with the
        proposer "jacobi_window", into a quarter with "hybrid".
        """
        if self.proposer not in HAVE_WINDOW or self.window_size != "auto":
            return self
        most = self.max_nodes_per_tree // (4 if self.proposer == "hybrid" else 2)
        sizes = range(paper_window_size(num_parameters) + 1)
        return replace(self, window_size=max(w for w in sizes if WindowShape(w).nodes <= most))

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

    @property
    def chain_length(self) -> int:
        """K, the tokens that the trained drafter proposes after each step; 0 without a drafter."""
        return 0 if self.drafter is None else int(self.drafter[CHAIN_LENGTH])

    @property
    def max_nodes_per_tree(self) -> int:
        """The maximum number of nodes of one tree: `budget` if it is a number."""
        for length in (self.budget, self.num_speculative_tokens):
            if length != "auto":
                return int(length)
        if self.proposer != "jacobi_window":
            return AUTO_DECODING_LENGTH
        auto = self.window_size == "auto"
        window = WindowShape(paper_window_size(0)) if auto else self.window
        # As many n-grams as the paper's: G is W.
        ngrams = max(1, window.window_size) * (window.ngram_size - 1)
        return min(MAX_DECODING_LENGTH, window.nodes + ngrams)

    @property
    def decoding_length(self) -> int:
        """The number of draft tokens for which the engine has room, in each request and step."""
        length = self.num_speculative_tokens
        return self.max_nodes_per_tree if length == "auto" else int(length)

    @property
    def window(self) -> WindowShape:
        """W and N; `window_size` must not be "auto"."""
        return WindowShape(int(self.window_size))

    def _check_nodes(self) -> None:
        """Raise OptionError if more nodes are asked for than a tree may have."""
        budget, length, size = self.budget, self.num_speculative_tokens, self.window_size
        if "auto" not in (budget, length) and int(budget) > int(length):
            raise OptionError(
                f"budget={budget} was given, but it must be at most "
                f'num_speculative_tokens={length}; write "auto", or leave budget out'
            )
        if self.proposer not in HAVE_WINDOW or size == "auto":
            return
        if (needed := self.window.nodes) > (most := self.max_nodes_per_tree):
            name = "num_speculative_tokens" if budget == "auto" else "budget"
            raise OptionError(
                f"window_size={size} was given, but its {needed} nodes are more than "
                f"{name}={most}; leave window_size out"
            )

    def _check_needs(self) -> None:
        """Raise OptionError if an option has no effect."""
        for name in ALLOWED:
            is_given = getattr(self, name) != getattr(type(self), name)
            if is_given and (missing := self._missing(name)) is not None:
                # Without its value: the URL of `share_with` may hold a password.
                raise OptionError(
                    f"{name} was given, but it has no effect without {missing}, or leave {name} out"
                )

    def _missing(self, name: str) -> str | None:
        """What the option has no effect without, and what to write; None if nothing is missing."""
        if name == "window_size" and self.proposer not in HAVE_WINDOW:
            return (
                "a window, which only the proposers 'hybrid' and 'jacobi_window' have; "
                "write proposer='hybrid'"
            )
        if name in OF_THE_TRIE and self.proposer == "jacobi_window":
            return "a trie, which the proposer 'jacobi_window' does not have; leave proposer out"
        if name == "share_with" and self.share == "none":
            return (
                "requests that learn from each other, and share='none' was given; "
                "write share='namespace'"
            )
        return None
