"""The table of what lookahead replaces or overrides in vLLM, read from `engine/seams.md`.

What is only called, read or set is found in the code itself, see `compare.problems`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lookahead_vllm

TABLE = Path(lookahead_vllm.__file__).parent / "engine" / "seams.md"

_ITEM = re.compile(
    r"`(?P<module>[\w.]+)(:(?P<name>[\w.]+))?[(\[](?P<needs>[\w, ]*)[)\]]` "
    r"is (?P<use>wrapped|swapped|overridden)( in (?P<release>[\d.]+))?: (?P<why>.+)"
)


class Seam(NamedTuple):
    """One place in vLLM that lookahead replaces or overrides."""

    module: str
    name: str
    """A function or a class; empty for the module itself."""
    needs: tuple[str, ...]
    """Parameters of a function, attributes and methods of a class, names that a module binds."""
    use: str
    """What is done to the place: "wrapped", "swapped" or "overridden"."""
    why: str
    until: str
    """The change in vLLM that would make the seam unnecessary."""
    area: str
    """The heading of its part of the table."""
    release: str
    """The only supported release that has this place, for instance "0.33"; empty: all have."""

    @property
    def is_patch(self) -> bool:
        """Whether lookahead replaces this place in vLLM's own class or module."""
        return self.use in ("wrapped", "swapped")

    @property
    def places(self) -> tuple[str, ...]:
        """Dotted paths, for instance "vllm.v1.engine.async_llm.AsyncLLM.generate"."""
        return tuple(
            f"{self.module}.{name}" for name in ((self.name,) if self.name else self.needs)
        )


def read(text: str) -> Iterator[Seam]:
    """The items of the table."""
    area = until = ""
    for block in re.split(r"\n(?=## |### |- )", text):
        line = re.sub(r"\s+", " ", block).strip()
        if block.startswith("## "):
            area = block.splitlines()[0].removeprefix("## ")
        elif block.startswith("### "):
            until = line.removeprefix("### Until ")
        elif area and block.startswith("- "):
            found = _ITEM.fullmatch(line.removeprefix("- "))
            assert found is not None, line
            needs = tuple(re.findall(r"\w+", found["needs"]))
            place = found["module"], found["name"] or "", needs
            yield Seam(*place, found["use"], found["why"], until, area, found["release"] or "")


SEAMS = tuple(read(TABLE.read_text(encoding="utf-8")))
