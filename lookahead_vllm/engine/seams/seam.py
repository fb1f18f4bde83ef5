"""One place where lookahead touches vLLM."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Use: TypeAlias = Literal["wrapped", "swapped", "overridden"]
"""What is done to a place:

wrapped
    `patches.patch` replaces it permanently.
swapped
    It is replaced while one function of vLLM runs (`patches.swapped`).
overridden
    A subclass of ours overrides or extends it.
"""

PUBLIC = "never: it is public"


class Seam(NamedTuple):
    """One place in vLLM that lookahead replaces or overrides."""

    module: str
    name: str
    """A function or a class; empty for the module itself."""
    needs: tuple[str, ...]
    """Parameters of a function, attributes and methods of a class, names that a module binds."""
    use: Use
    why: str
    until: str
    """The change in vLLM that would make the seam unnecessary."""
    releases: tuple[str, ...] = ()
    """The supported releases that have this place, for instance "0.33"; empty: all."""

    @property
    def is_patch(self) -> bool:
        """Whether lookahead replaces this place in vLLM's own class or module."""
        return self.use in ("wrapped", "swapped")

    @property
    def places(self) -> tuple[str, ...]:
        """Dotted paths, for instance "vllm.v1.engine.async_llm.AsyncLLM.generate"."""
        module = self.module.removesuffix(".__init__")
        return tuple(f"{module}.{name}" for name in ((self.name,) if self.name else self.needs))
