"""What a user may set, in the papers' names, checked at start-up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path

from lookahead_vllm.draft.registry import KEEP_CACHE, PROPOSERS

DRAFTS = ("hierarchical", "parallel", "single")
SOURCES = ("both", "prompt", "output")
SHARES = ("none", "namespace", "all")

WEEK = 7 * 24 * 3600


class OptionError(ValueError):
    """One sentence: what was given, what is allowed, what to write instead."""


@dataclass(frozen=True)
class LookaheadOptions:
    """The options of lookahead decoding; making one with a wrong value raises OptionError.

    Attributes
    ----------
    num_speculative_tokens : int
        The decoding length: the most nodes of one draft tree, 1 to 128.
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
    sources : "both", "prompt" or "output"
        What is inserted into the trie. Source: the same paper's ablation, section 5.4.
    proposer : str
        Who grows the trees: a key of `registry.PROPOSERS`.
    budget : "auto" or int
        "auto": every step sends only the nodes that the measured cost of a step is worth.
        A number: that many nodes for each request, always.
    share : "none", "namespace" or "all"
        Which requests learn from each other's answers: none, those of one namespace, or all.
    cache_path : str or None
        The file in which what was learned outlives the server.
    cache_interval : int or float
        Seconds between two saves of it, 0 to a week; 0: only when the server ends.
    """

    num_speculative_tokens: int = 16
    branch_length: int = 64
    max_nodes: int = 4_000_000
    max_bytes: int | None = None
    draft: str = "hierarchical"
    sources: str = "both"
    proposer: str = "ngram_trie"
    budget: str | int = "auto"
    share: str = "namespace"
    cache_path: str | None = None
    cache_interval: float = 300

    def __post_init__(self) -> None:
        self._check_int("num_speculative_tokens", 1, 128)
        self._check_int("branch_length", 1, 64)
        self._check_int("max_nodes", 1024, 2**30 - 1)
        if self.max_bytes is not None:
            self._check_int("max_bytes", 16_384, 2**40)
        self._check_choice("draft", DRAFTS)
        self._check_choice("sources", SOURCES)
        if not isinstance(self.proposer, str) or self.proposer not in PROPOSERS:
            raise _wrong("proposer", self.proposer, f"one of {', '.join(PROPOSERS)}", "ngram_trie")
        most = self.num_speculative_tokens
        if self.budget != "auto" and not _is_int(self.budget, 1, most):
            allowed = f'"auto" or 1 to num_speculative_tokens={most} nodes'
            raise _wrong("budget", self.budget, allowed, "auto")
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
