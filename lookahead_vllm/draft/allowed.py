"""The values that an option allows, and the names that a misspelled one may mean."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any

_BLANKS_AND_QUOTES = " \t\r\n\"'`\u2018\u2019\u201c\u201d"
_IGNORED = re.compile(f"[{_BLANKS_AND_QUOTES}\\[\\]_\u2013\u2014-]+")

_LONGEST_NAME = 60
"""Nothing is similar to a longer one."""

_WRONG = object()


class OptionError(ValueError):
    """An invalid option; the message says what was given, what is allowed and what to write."""


def folded(name: object) -> str:
    """A name or a word without case, blanks, quotes, brackets, dashes and underscores."""
    return _IGNORED.sub("", str(name)).casefold()


def nearest(given: object, known: Iterable[str]) -> str | None:
    """The one of `known` that `given` is probably meant to be, or None."""
    text, names = folded(given), {folded(name): name for name in known}
    if len(text) > _LONGEST_NAME:
        return None
    parts = [name for name in names if name in text or (len(text) > 2 and text in name)]
    whole = [name for name in parts if name in text]
    parts = [name for name in parts if not any(name in other != name for other in whole)]
    close = parts if len(parts) == 1 else get_close_matches(text, names, n=1)
    return names[close[0]] if close else None


def with_known_names(given: Mapping[Any, Any], known: Iterable[str]) -> dict[str, Any]:
    """`given` with the names of `known`, however they were spelled.

    Raises
    ------
    OptionError
        A name is unknown, or was given twice.
    """
    names = {folded(name): name for name in known}
    spellings: dict[str, Any] = {}
    for spelling in given:
        name = names.get(folded(spelling))
        if name is None:
            close = nearest(spelling, names.values())
            raise OptionError(
                f"option {reprlib.repr(spelling)} was given, but lookahead's options are "
                f"{', '.join(names.values())}; "
                + (f"did you mean {close!r}?" if close else "leave it out")
            )
        if name in spellings:
            raise OptionError(
                f"{name} was given twice, as {spellings[name]!r} and as {spelling!r}; write it once"
            )
        spellings[name] = spelling
    return {name: given[spelling] for name, spelling in spellings.items()}


@dataclass(frozen=True)
class Allowed:
    """The values of an option: some words, and numbers of a range or any text.

    Attributes
    ----------
    words
        Texts, True and False, or None.
    numbers
        The least and the greatest number.
    kind
        What its numbers or its texts are, in a message. Only "a number of seconds" has fractions.
    is_text
        Whether any text is allowed that is not empty.
    """

    words: tuple[str | bool | None, ...] = ()
    numbers: tuple[int, int] | None = None
    kind: str = "a whole number"
    is_text: bool = False

    def read(self, name: str, value: Any, instead: Any) -> Any:
        """The value that was meant by `value`, given for `name`.

        `instead` is recommended where no word is similar to what was given.

        Raises
        ------
        OptionError
            The value is not allowed.
        """
        if (read := self._read(value)) is not _WRONG:
            return read
        words = [word for word in self.words if isinstance(word, str)]
        close = nearest(value, words) if isinstance(value, str) else None
        advice = instead if close is None else close
        if isinstance(advice, bool):  # the opposite may be meant
            advice = None
        raise OptionError(
            f"{name}={reprlib.repr(value)} was given, but it must be {self}; "
            + ("" if advice is None else f"write {json.dumps(advice)}, or ")
            + f"leave {name} out"
        )

    def __str__(self) -> str:
        words = [word for word in self.words if word is not None]
        if words == [True, False]:
            return "true or false"
        if self.is_text:
            return self.kind
        if self.numbers is None:
            return f"one of {', '.join(map(str, words))}"
        low, high = self.numbers
        options = [*map(json.dumps, words), f"{self.kind} from {low} to {high}"]
        return " or ".join(options)

    def _read(self, value: Any) -> Any:
        """The allowed value with exactly this meaning, or _WRONG."""
        if value is None or isinstance(value, bool):
            return value if any(value is word for word in self.words) else _WRONG
        if isinstance(value, str | os.PathLike) and self.is_text:
            text = os.fspath(value).strip(_BLANKS_AND_QUOTES)
            if None in self.words and text.casefold() in ("none", "null"):
                return None
            return text if text and "\0" not in text else _WRONG
        if isinstance(value, str):
            meanings = {folded(word): word for word in self.words}
            if None in self.words:
                meanings["null"] = None
            if folded(value) in meanings:
                return meanings[folded(value)]
        number = _number(value)
        if number is None:
            return _WRONG
        if True in self.words and number in (0, 1):
            return bool(number)
        if self.numbers is None or not self.numbers[0] <= number <= self.numbers[1]:
            return _WRONG
        if number == int(number):
            return int(number)
        return _WRONG if self.kind == "a whole number" else number


def _number(value: Any) -> int | float | None:
    """The number that `value` is or spells; None if it is none."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return value if isinstance(value, int) else float(value)
    if isinstance(value, str):
        for read in (int, float):
            with suppress(ValueError):
                return read(value.strip(_BLANKS_AND_QUOTES))
    return None
