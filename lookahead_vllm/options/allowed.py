"""What an option may be, and the sentence that refuses everything else."""

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


def check_name(
    name: object, known: Collection[str], whose: str = "lookahead's options are"
) -> None:
    """Raise OptionError if the option `name` is not `known`."""
    if name not in known:
        close = nearest(name, known)
        raise OptionError(
            f"option {reprlib.repr(name)} was given, but {whose} {', '.join(known)}; "
            + (f"did you mean {close!r}?" if close else "leave it out")
        )


@dataclass(frozen=True)
class Allowed:
    """The values of an option: some words, and whole numbers of a range; or a text."""

    words: tuple[str, ...] = ()
    numbers: tuple[int, int] | None = None
    """The least and the greatest."""
    text: str = ""
    """What the text is, in a message."""
    example: object = None
    """Recommended in place of a wrong value. None: the default."""

    def check(self, name: str, value: Any, default: object) -> None:
        """Raise OptionError if `value`, given for `name`, is not allowed."""
        if self._holds(value):
            return
        close = nearest(value, self.words) if isinstance(value, str) else None
        raise OptionError(
            f"{name}={reprlib.repr(value)} was given, but it must be {self}; "
            f"write {json.dumps(close or self.example or default)}, or leave {name} out"
        )

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.numbers is None:
            return f"one of {', '.join(self.words)}"
        low, high = self.numbers
        return " or ".join([*map(json.dumps, self.words), f"a whole number from {low} to {high}"])

    def _holds(self, value: Any) -> bool:
        if self.text:
            return isinstance(value, str) and value != "" and "\0" not in value
        if self.numbers is not None and type(value) is int:
            return self.numbers[0] <= value <= self.numbers[1]
        return isinstance(value, str) and value in self.words
