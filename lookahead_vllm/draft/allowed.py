"""The values that an option allows, and the names that a misspelled one may mean."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

_LONGEST_NAME = 60
"""Nothing is similar to a longer one."""


class OptionError(ValueError):
    """An invalid option; the message says what was given, what is allowed and what to write."""


def nearest(given: object, known: Collection[str]) -> str | None:
    """The one of `known` that `given` is probably meant to be, or None."""
    text = str(given).strip().lower().replace("-", "_")
    if len(text) > _LONGEST_NAME:
        return None
    parts = [name for name in known if name in text or (len(text) > 2 and text in name)]
    close = parts if len(parts) == 1 else get_close_matches(text, known, n=1)
    return close[0] if close else None


def check_names(given: Collection[object], known: Collection[str]) -> None:
    """Raise OptionError if one of the names `given` is not `known`."""
    for name in given:
        if name not in known:
            close = nearest(name, known)
            raise OptionError(
                f"option {reprlib.repr(name)} was given, but lookahead's options are "
                f"{', '.join(known)}; " + (f"did you mean {close!r}?" if close else "leave it out")
            )


@dataclass(frozen=True)
class Allowed:
    """The values of an option: some words, and numbers of a range; or any text, without these two.

    Attributes
    ----------
    numbers
        The least and the greatest number.
    kind
        What its numbers or its texts are, in a message. Only "a number of seconds" has fractions.
    """

    words: tuple[str, ...] = ()
    numbers: tuple[int, int] | None = None
    kind: str = "a whole number"

    def check(self, name: str, value: Any, instead: Any) -> None:
        """Raise OptionError if `value`, given for `name`, is not allowed.

        `instead` is recommended where no word is similar to what was given.
        """
        if self._holds(value):
            return
        close = nearest(value, self.words) if isinstance(value, str) else None
        advice = instead if close is None else close
        raise OptionError(
            f"{name}={reprlib.repr(value)} was given, but it must be {self}; "
            + ("" if advice is None else f"write {json.dumps(advice)}, or ")
            + f"leave {name} out"
        )

    def __str__(self) -> str:
        if self.numbers is not None:
            low, high = self.numbers
            return " or ".join([*map(json.dumps, self.words), f"{self.kind} from {low} to {high}"])
        return f"one of {', '.join(self.words)}" if self.words else self.kind

    def _holds(self, value: Any) -> bool:
        if isinstance(value, str) and value in self.words:
            return True
        if self.numbers is not None:
            has_fractions = self.kind != "a whole number"
            is_number = type(value) is int or (has_fractions and type(value) is float)
            return is_number and self.numbers[0] <= value <= self.numbers[1]
        return not self.words and isinstance(value, str) and value != "" and "\0" not in value
