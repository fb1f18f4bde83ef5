"""The options of lookahead decoding, named as in the papers and checked at start-up."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path

from lookahead_vllm.draft.registry import HAVE_WINDOW, KEEP_CACHE, PROPOSERS
from lookahead_vllm.draft.window.shape import (
    MAX_GUESS_SET_SIZE,
    MAX_NGRAM_SIZE,
    MAX_WINDOW_SIZE,
    PAPER_NGRAM_SIZE,
    WindowShape,
    paper_window_size,
)

DRAFTS = ("hierarchical", "parallel", "single")
SOURCES = ("both", "prompt", "output", "none")
SHARES = ("none", "namespace", "all")
SHIFTS = ("one", "hits", "paper")

MAX_DECODING_LENGTH = 128

AUTO_DECODING_LENGTH = 64
"""The most nodes of a tree unless the user sets another number. The budget sends only those that
pay; if a text is copied, many do."""

AUTO_RECURRENT_LENGTH = 16
"""The same for a model with recurrent layers, which keeps a state for each node."""

MIN_TOKENS_FOR_HYBRID = 64
"""The critical decoding length from which "auto" is "hybrid": its additional sources give a fifth
more tokens a step with 64 nodes, and no gain with few."""

MAX_PARALLEL = 8

MAX_DRAFT_THREADS = 64
AUTO_DRAFT_THREADS = 4
"""The most threads that "auto" takes; more gain little, because a step's trees are few."""

WEEK_SECONDS = 7 * 24 * 3600


class OptionError(ValueError):
    """An invalid option; the message says what was given, what is allowed and what to write."""


@dataclass(frozen=True)
class LookaheadOptions:
    """The options of lookahead decoding; a wrong value raises OptionError.

    Attributes
    ----------
    num_speculative_tokens : "auto" or int
        The decoding length: the maximum number of nodes of one draft tree, 1 to 128. "auto": 64;
        for "jacobi_window" the nodes of both its branches. It is 16 for a model with recurrent
        layers, which keeps a state for each node. With LoRA, it is the number that fits into a step
        for all requests. A `budget` that is a number also limits it.
    branch_length : int
        The maximum length of a branch below the root, in tokens, 1 to 64.
    max_nodes : int
        The capacity of the trie in n-grams, for all prompts and answers together, at least 1024.
        An n-gram takes 16 bytes; all are allocated at start-up.
    max_bytes : int or None
        The same capacity in bytes, at least 16384; the smaller of the two applies.
    draft : "hierarchical", "parallel" or "single"
        The shape of a draft: branches merged into a tree, branches that share only the root, or
        one branch. Source: Lookahead (KDD 2024), section 4.1.
    sources : "both", "prompt", "output" or "none"
        The texts that are inserted into the trie. Source: the same paper, section 5.4.
    proposer : "auto" or str
        The proposer that grows the trees, a key of `registry.PROPOSERS`. "auto": "hybrid" where
        tokens in a step are nearly free, else "ngram_trie".
    budget : "auto" or int
        "auto": each step sends only the nodes that pay for themselves, by the measured cost of a
        step. A number: each step sends up to that many nodes for each request, whatever they cost.
    window_size : "auto" or int
        W of the lookahead branch, 0 to 128; 0 disables the branch. "auto": by the size of the
        model, as in Lookahead Decoding (ICML 2024), Table 4, as far as the nodes suffice.
    ngram_size : int
        N of the lookahead branch, 2 to 16; 2 is Jacobi decoding.
    guess_set_size : "auto" or int
        G, 1 to 128: the maximum number of candidates that a step takes from the pool of
        "jacobi_window". "auto" is W.
    pool_from_prompt : bool
        Whether the n-grams of the prompt are added to that pool.
    window_shift : "one", "hits" or "paper"
        How the window moves when a step accepts several tokens: as after one token, by as many
        positions, or by as many levels (Algorithm 2).
    draft_threads : "auto" or int
        The threads that grow the trees of a step, 1 to 64. Drafts do not depend on it. "auto": 1
        if the model runs on the CPU, else a quarter of the cores, at most 4.
    parallel : int
        Replicas of the model that verify one step together, 1 to 8, each a part of the nodes.
        Source: Lookahead Decoding (ICML 2024), section 3.4.
    share : "none", "namespace" or "all"
        Which requests learn from each other's answers: none, those of one namespace, or all.
    cache_path : str or None
        The file that keeps the cache when the server stops.
    cache_interval : int or float
        Seconds between two saves of that file, 0 to a week. 0 saves only when the server stops.
    max_reference_tokens : int
        The maximum number of reference tokens of one request, 1 to 2**20. In a reference that is
        text, 4 bytes of UTF-8 count as a token.
    max_live_reference_tokens : int
        The maximum for all live requests of one API server together, 1 to 2**24. The default
        fills half of a trie of the default size.
    accept_references : bool
        Whether requests may bring references. False ignores these.
    accept_namespaces : bool
        Whether requests may name their namespace. False derives it from the LoRA adapter and
        cache_salt only.
    """

    num_speculative_tokens: str | int = "auto"
    branch_length: int = 64
    max_nodes: int = 4_000_000
    max_bytes: int | None = None
    draft: str = "hierarchical"
    sources: str = "both"
    proposer: str = "auto"
    budget: str | int = "auto"
    window_size: str | int = "auto"
    ngram_size: int = PAPER_NGRAM_SIZE
    guess_set_size: str | int = "auto"
    pool_from_prompt: bool = False
    window_shift: str = "one"
    draft_threads: str | int = "auto"
    parallel: int = 1
    share: str = "namespace"
    cache_path: str | None = None
    cache_interval: float = 300
    max_reference_tokens: int = 16_384
    max_live_reference_tokens: int = 131_072
    accept_references: bool = True
    accept_namespaces: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.proposer, str) or self.proposer not in ("auto", *PROPOSERS):
            raise _wrong(
                "proposer", self.proposer, f'"auto" or one of {", ".join(PROPOSERS)}', "auto"
            )
        self._check_window()
        length = self.num_speculative_tokens
        if length != "auto" and not _is_int(length, 1, MAX_DECODING_LENGTH):
            allowed = f'"auto" or a whole number from 1 to {MAX_DECODING_LENGTH}'
            raise _wrong("num_speculative_tokens", length, allowed, "auto")
        self._check_int("branch_length", 1, 64)
        self._check_int("max_nodes", 1024, 2**30 - 1)
        if self.max_bytes is not None:
            self._check_int("max_bytes", 16_384, 2**40)
        self._check_choice("draft", DRAFTS)
        self._check_choice("sources", SOURCES)
        max_budget = MAX_DECODING_LENGTH if length == "auto" else int(length)
        if self.budget != "auto" and not _is_int(self.budget, 1, max_budget):
            bound = max_budget if length == "auto" else f"num_speculative_tokens={max_budget}"
            raise _wrong("budget", self.budget, f'"auto" or 1 to {bound} nodes', "auto")
        self._check_comb()
        if self.draft_threads != "auto" and not _is_int(self.draft_threads, 1, MAX_DRAFT_THREADS):
            raise _wrong(
                "draft_threads", self.draft_threads, f'"auto" or 1 to {MAX_DRAFT_THREADS}', "auto"
            )
        self._check_int("parallel", 1, MAX_PARALLEL)
        self._check_choice("share", SHARES)
        path = self.cache_path
        if path is not None and (not isinstance(path, str) or not path or "\0" in path):
            raise _wrong("cache_path", path, "the path of a file", "lookahead.cache")
        if path is not None and self.proposer not in ("auto", *KEEP_CACHE):
            raise OptionError(
                f"cache_path={path!r} was given, but the proposer {self.proposer!r} keeps no "
                "cache; leave cache_path out"
            )
        seconds = self.cache_interval
        if type(seconds) not in (int, float) or not 0 <= seconds <= WEEK_SECONDS:
            allowed = f"a number of seconds from 0 to {WEEK_SECONDS}"
            raise _wrong("cache_interval", seconds, allowed, 300)
        self._check_references()
        self._check_bool("accept_namespaces")

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> LookaheadOptions:
        """Make options of `given`; an option that is missing or None gets its default.

        Raises
        ------
        OptionError
            A key is unknown, a value has a wrong type or is out of range, or two contradict.
        """
        names = [field.name for field in fields(cls)]
        for key in given:
            if key not in names:
                close = get_close_matches(str(key), names, n=1)
                raise OptionError(
                    f"option {key!r} was given, but lookahead's options are {', '.join(names)}; "
                    + (f"did you mean {close[0]!r}?" if close else "leave it out")
                )
        values = {key: value for key, value in given.items() if value is not None}
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks the types

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
        """Replace "auto" in `window_size` and `guess_set_size`, for a model of this size.

        W is the paper's, or the largest whose comb fits into half of a tree's nodes with the
        proposer "jacobi_window", into a quarter with "hybrid". G is W, at least 1.
        """
        if self.proposer not in HAVE_WINDOW:
            return self
        size, guesses = self.window_size, self.guess_set_size
        if size == "auto":
            sizes = range(paper_window_size(num_parameters) + 1)
            nodes = [WindowShape(size, self.ngram_size).nodes for size in sizes]
            size = max(s for s, n in zip(sizes, nodes, strict=True) if n <= self._max_comb_nodes)
        if guesses == "auto":
            guesses = max(1, int(size))
        return replace(self, window_size=size, guess_set_size=guesses)

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

    def for_device(self, on_cpu: bool, num_cores: int) -> LookaheadOptions:
        """Replace "auto" in `draft_threads`: 1 if the model runs on the CPU.

        Else a quarter of the cores, at least 1 and at most AUTO_DRAFT_THREADS.
        """
        if self.draft_threads != "auto":
            return self
        threads = 1 if on_cpu else max(1, min(AUTO_DRAFT_THREADS, num_cores // 4))
        return replace(self, draft_threads=threads)

    @property
    def num_draft_threads(self) -> int:
        """The threads that grow trees; 1 while `draft_threads` is "auto"."""
        return 1 if self.draft_threads == "auto" else int(self.draft_threads)

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
        guesses = size if self.guess_set_size == "auto" else int(self.guess_set_size)
        comb = WindowShape(size, self.ngram_size).nodes
        return min(MAX_DECODING_LENGTH, max(1, comb + guesses * (self.ngram_size - 1)))

    def _check_window(self) -> None:
        self._check_int("ngram_size", 2, MAX_NGRAM_SIZE)
        for name, low, high in (
            ("window_size", 0, MAX_WINDOW_SIZE),
            ("guess_set_size", 1, MAX_GUESS_SET_SIZE),
        ):
            value = getattr(self, name)
            if value != "auto" and not _is_int(value, low, high):
                raise _wrong(name, value, f'"auto" or {low} to {high}', "auto")
        self._check_bool("pool_from_prompt")
        self._check_choice("window_shift", SHIFTS)
        if self.proposer in HAVE_WINDOW:
            return
        for name in ("window_size", "guess_set_size"):
            if getattr(self, name) != "auto":
                raise OptionError(
                    f"{name}={getattr(self, name)!r} was given, but only the proposers "
                    f"'hybrid' and 'jacobi_window' have a window; leave {name} out, or write "
                    "proposer='hybrid'"
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

    def _check_references(self) -> None:
        self._check_bool("accept_references")
        self._check_int("max_reference_tokens", 1, 2**20)
        self._check_int("max_live_reference_tokens", 1, 2**24)
        one, all_live = self.max_reference_tokens, self.max_live_reference_tokens
        if one > all_live:
            raise OptionError(
                f"max_reference_tokens={one} was given, but all requests together may have "
                f"max_live_reference_tokens={all_live}; write max_live_reference_tokens={one} or "
                "more"
            )

    def _check_bool(self, name: str) -> None:
        value = getattr(self, name)
        if type(value) is not bool:
            default = type(self).__dataclass_fields__[name].default
            raise _wrong(name, value, "true or false", default)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            default = type(self).__dataclass_fields__[name].default
            raise _wrong(name, value, f"one of {', '.join(choices)}", default)

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not _is_int(value, low, high):
            default = type(self).__dataclass_fields__[name].default
            raise _wrong(name, value, f"a whole number from {low} to {high}", default)


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # isinstance would accept a bool


def _wrong(name: str, value: object, allowed: str, instead: object) -> OptionError:
    advice = f"leave {name} out" if instead is None else f"write {json.dumps(instead)}"
    return OptionError(f"{name}={value!r} was given, but it must be {allowed}; {advice}")
