"""What a user may set, in the papers' names, checked at start-up."""

from __future__ import annotations

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

WEEK = 7 * 24 * 3600


class OptionError(ValueError):
    """One sentence: what was given, what is allowed, what to write instead."""


@dataclass(frozen=True)
class LookaheadOptions:
    """The options of lookahead decoding; making one with a wrong value raises OptionError.

    Attributes
    ----------
    num_speculative_tokens : int
        The decoding length: the most nodes of one draft tree, 1 to 128. By default 16; 64 with
        the proposer "hybrid"; with "jacobi_window" what both branches take.
    branch_length : int
        The longest branch below the root, in tokens, 1 to 64.
    max_nodes : int
        The most n-grams that the trie holds, of all prompts and answers together, at least 1024;
        16 bytes each, allocated at start-up.
    max_bytes : int or None
        The same bound in bytes, at least 16384; the tighter one holds.
    draft : "hierarchical", "parallel" or "single"
        The paper's drafts: branches merged into a tree, branches that part at the root alone, or
        one branch. Source: Lookahead (KDD 2024), section 4.1.
    sources : "both", "prompt", "output" or "none"
        What is inserted into the trie. Source: the same paper's ablation, section 5.4.
    proposer : str
        Who grows the trees: a key of `registry.PROPOSERS`.
    budget : "auto" or int
        "auto": every step sends only the nodes that the measured cost of a step is worth.
        A number: that many nodes for each request, always.
    window_size : "auto" or int
        W of the lookahead branch, 0 to 128; 0 is none. "auto": by the size of the model, as in
        Lookahead Decoding (ICML 2024), Table 4, and no more than there are nodes for.
    ngram_size : int
        N, 2 to 16; 2 is Jacobi decoding.
    guess_set_size : "auto" or int
        G, 1 to 128: candidates that the pool of "jacobi_window" gives a step; "auto" is W.
    pool_from_prompt : bool
        Whether the n-grams of the prompt are put into that pool, too.
    window_shift : "one", "hits" or "paper"
        What becomes of the window when several tokens are accepted at once: it moves on as after
        one, by as many positions, or by as many levels (Algorithm 2).
    share : "none", "namespace" or "all"
        Which requests learn from each other's answers: none, those of one namespace, or all.
    cache_path : str or None
        The file in which what was learned outlives the server.
    cache_interval : int or float
        Seconds between two saves of it, 0 to a week; 0: only when the server ends.
    max_reference_tokens : int
        The most tokens of references that one request may bring, 1 to 2**20. A token id counts as
        one, and so do 4 bytes of a text in UTF-8.
    max_live_reference_tokens : int
        The same for all requests together that one API server is answering, 1 to 2**24. In a trie
        of the default size, references up to the default take half of the room.
    accept_references : bool
        False: what requests say of references is ignored.
    accept_namespaces : bool
        False: the namespace is made of LoRA adapter and cache_salt alone, whatever requests say.
    """

    num_speculative_tokens: int = None  # type: ignore[assignment]  # until __post_init__
    branch_length: int = 64
    max_nodes: int = 4_000_000
    max_bytes: int | None = None
    draft: str = "hierarchical"
    sources: str = "both"
    proposer: str = "ngram_trie"
    budget: str | int = "auto"
    window_size: str | int = "auto"
    ngram_size: int = PAPER_NGRAM_SIZE
    guess_set_size: str | int = "auto"
    pool_from_prompt: bool = False
    window_shift: str = "one"
    share: str = "namespace"
    cache_path: str | None = None
    cache_interval: float = 300
    max_reference_tokens: int = 16_384
    max_live_reference_tokens: int = 131_072
    accept_references: bool = True
    accept_namespaces: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.proposer, str) or self.proposer not in PROPOSERS:
            raise _wrong("proposer", self.proposer, f"one of {', '.join(PROPOSERS)}", "ngram_trie")
        self._check_window()
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", self._default_length())
        if not _is_int(self.num_speculative_tokens, 1, MAX_DECODING_LENGTH):
            allowed = f"a whole number from 1 to {MAX_DECODING_LENGTH}"
            raise _wrong("num_speculative_tokens", self.num_speculative_tokens, allowed, 16)
        self._check_int("branch_length", 1, 64)
        self._check_int("max_nodes", 1024, 2**30 - 1)
        if self.max_bytes is not None:
            self._check_int("max_bytes", 16_384, 2**40)
        self._check_choice("draft", DRAFTS)
        self._check_choice("sources", SOURCES)
        most = self.num_speculative_tokens
        if self.budget != "auto" and not _is_int(self.budget, 1, most):
            allowed = f'"auto" or 1 to num_speculative_tokens={most} nodes'
            raise _wrong("budget", self.budget, allowed, "auto")
        self._check_comb()
        self._check_choice("share", SHARES)
        path = self.cache_path
        if path is not None and (not isinstance(path, str) or not path or "\0" in path):
            raise _wrong("cache_path", path, "the path of a file", "lookahead.cache")
        if path is not None and self.proposer not in KEEP_CACHE:
            raise OptionError(
                f"cache_path={path!r} was given, but the proposer {self.proposer!r} keeps no "
                "cache; leave cache_path out"
            )
        seconds = self.cache_interval
        if type(seconds) not in (int, float) or not 0 <= seconds <= WEEK:
            raise _wrong("cache_interval", seconds, f"a number of seconds from 0 to {WEEK}", 300)
        self._check_references()
        self._check_bool("accept_namespaces")

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> LookaheadOptions:
        """Make options of `given`; what is not given, or is a None, gets its default.

        Raises
        ------
        OptionError
            An unknown key, a wrong type, a value out of its range, or two that contradict.
        """
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                close = get_close_matches(str(key), known, n=1)
                raise OptionError(
                    f"option {key!r} was given, but lookahead knows {', '.join(known)}; "
                    + (f"did you mean {close[0]!r}?" if close else "leave it out")
                )
        values = {key: value for key, value in given.items() if value is not None}
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks the types

    def to_dict(self) -> dict[str, object]:
        """Plain values that `from_dict` reads back."""
        return asdict(self)

    def with_checked_cache(self) -> LookaheadOptions:
        """The same with an absolute `cache_path`, after a look at its directory.

        Raises
        ------
        OptionError
            No file can be written there.
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
        """The same without an "auto" in the window, for a model of that size.

        The paper's W where there are nodes for it: for the comb and G candidates in the proposer
        "jacobi_window", for the comb and as much again in "hybrid".
        """
        if self.proposer not in HAVE_WINDOW:
            return self
        size, guesses = self.window_size, self.guess_set_size
        if size == "auto":
            most = self._max_comb_nodes
            paper = paper_window_size(num_parameters)
            fitting = [w for w in range(paper + 1) if WindowShape(w, self.ngram_size).nodes <= most]
            size = fitting[-1]
        if guesses == "auto":
            guesses = max(1, int(size))
        return replace(self, window_size=size, guess_set_size=guesses)

    @property
    def most_nodes(self) -> int:
        """Of one tree: the budget, where it is fixed."""
        return self.num_speculative_tokens if self.budget == "auto" else int(self.budget)

    @property
    def window(self) -> WindowShape:
        """W and N, where W is no longer "auto"."""
        return WindowShape(int(self.window_size), self.ngram_size)

    @property
    def _max_comb_nodes(self) -> int:
        """The nodes that a comb of "auto" size may have: fewer where other sources compete."""
        return self.most_nodes // (4 if self.proposer == "hybrid" else 2)

    def _default_length(self) -> int:
        if self.proposer == "hybrid":
            return 64
        if self.proposer != "jacobi_window":
            return 16
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
                    f"{name}={getattr(self, name)!r} was given, but the proposer "
                    f"{self.proposer!r} has no window; write proposer='hybrid', or leave it out"
                )

    def _check_comb(self) -> None:
        if self.proposer not in HAVE_WINDOW or self.window_size == "auto":
            return
        most = self.most_nodes
        if self.window.nodes > most:
            name = "num_speculative_tokens" if self.budget == "auto" else "budget"
            raise OptionError(
                f"window_size={self.window_size} and ngram_size={self.ngram_size} were given, "
                f"but their {self.window.nodes} nodes are more than {name}={most}; "
                "write window_size='auto'"
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
    return type(value) is int and low <= value <= high  # a bool is no number here


def _wrong(name: str, value: object, allowed: str, instead: object) -> OptionError:
    return OptionError(f"{name}={value!r} was given, but it must be {allowed}; write {instead!r}")
