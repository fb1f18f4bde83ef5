"""The ways in which an engine runs and ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

CONTAINED = ("pid1", "tty", "shell")
"""Targets that are in a container: a PID namespace of its own."""


class Ending(NamedTuple):
    """How an engine runs, and how it is ended."""

    kind: str
    """serve, offline (the engine in processes of its own) or inline (in the script's process)."""
    ranks: int
    target: str
    """The receiver of the signal: main, group, pid1 (the first process of a container), shell (a
    shell that is the first process and did not `exec`), or tty (Ctrl-C in a container with a
    terminal). exit: no signal, the script ends by itself."""
    signal: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}-{self.target}-{self.signal}".removesuffix("-")


def endings() -> Iterator[Ending]:
    """All of them."""
    for ranks in (1, 2):
        for name in ("TERM", "INT"):
            for target in ("main", "group", "pid1", "tty", "shell"):
                yield Ending("serve", ranks, target, name)
        for kind in ("offline", "inline"):
            yield Ending(kind, ranks, "exit", "")
            for name in ("TERM", "INT"):
                for target in ("main", "group"):
                    yield Ending(kind, ranks, target, name)
