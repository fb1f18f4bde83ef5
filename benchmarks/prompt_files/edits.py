"""Edits of code, each with the instruction that asks for it; a seed decides them."""

import builtins
import keyword
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

NEW_NAMES = ("entry", "amount", "outcome", "current", "source", "target", "counter", "buffer")
MIN_OCCURRENCES = 3
"""Of a name that is renamed."""


class Edit(NamedTuple):
    """An instruction, and the whole text after it."""

    instruction: str
    text: str


def rename(code: str, rng: random.Random) -> Edit | None:
    """Replace all occurrences of a name by a new name; None if no name occurs three times, or all
    new ones do already."""
    counts = Counter(re.findall(r"\b[A-Za-z_]\w+\b", code))
    taken = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins)}
    names = sorted(n for n, count in counts.items() if count >= MIN_OCCURRENCES and n not in taken)
    new_names = [name for name in NEW_NAMES if name not in counts]
    if not names or not new_names:
        return None
    old, new = rng.choice(names), rng.choice(new_names)
    return Edit(f"Rename `{old}` to `{new}`.", re.sub(rf"\b{old}\b", new, code))


def delete_line(code: str, rng: random.Random) -> Edit | None:
    """Delete one line; None if the text has a single line."""
    lines = code.split("\n")
    candidates = [number for number, line in enumerate(lines) if line.strip()]
    if len(candidates) < 2:
        return None
    number = rng.choice(candidates)
    return Edit(
        f"Delete the line `{lines[number].strip()}`.",
        "\n".join(lines[:number] + lines[number + 1 :]),
    )


def insert_line(code: str, rng: random.Random) -> Edit:
    """Insert a comment before a line."""
    lines = code.split("\n")
    number = rng.choice([number for number, line in enumerate(lines) if line.strip()])
    line = lines[number]
    indent = line[: len(line) - len(line.lstrip())]
    comment = f"{indent}# Step {rng.randrange(1, 100)}: see the notes."
    return Edit(
        f"Put the comment `{comment.strip()}` before the line `{line.strip()}`.",
        "\n".join([*lines[:number], comment, *lines[number:]]),
    )


EDITS: dict[str, Callable[[str, random.Random], Edit | None]] = {
    "rename": rename,
    "delete": delete_line,
    "insert": insert_line,
}


def append(code: str, more: str) -> Edit:
    """Add a piece of code at the end."""
    return Edit(f"Add this at the end:\n{more}", f"{code.rstrip()}\n\n\n{more.strip()}\n")
