"""How lookahead replaces parts of vLLM: every replacement is recorded, and none is made twice.

`patch` lasts as long as the process, `swapped` as long as a `with` block. Both kinds are listed in
`seams.md`. Importing this module costs next to nothing: every vLLM process does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class PatchError(RuntimeError):
    """A place that has a patch already, or does not exist."""


_applied: list[tuple[type | ModuleType, str]] = []
"""Owner and name of every patch of this process. The owners stay alive, so they stay distinct."""

_MISSING = object()


def patch(owner: type | ModuleType, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace `name`, which the class or module `owner` itself defines, by `wrapper(original)`.

    A static or class method stays one: `wrapper` gets the function inside.

    Raises
    ------
    PatchError
        `owner` does not define `name`, or lookahead has patched it already.
    """
    original = vars(owner).get(name, _MISSING)
    if original is _MISSING:
        raise PatchError(f"{_place(owner, name)} does not exist, so it cannot be patched")
    if is_patched(owner, name):
        raise PatchError(f"lookahead has patched {_place(owner, name)} already; patch it once")
    if isinstance(original, staticmethod | classmethod):
        setattr(owner, name, type(original)(wrapper(original.__func__)))
    else:
        setattr(owner, name, wrapper(original))
    _applied.append((owner, name))


def is_patched(owner: type | ModuleType, name: str | None = None) -> bool:
    """Whether lookahead has patched this attribute of `owner`; without a name, any of them."""
    return any(owner is other and name in (None, patched) for other, patched in _applied)


def applied() -> list[str]:
    """The dotted paths of the patches of this process, in the order in which they were made."""
    return [_place(owner, name) for owner, name in _applied]


@contextmanager
def swapped(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace `name` of any object inside the `with` block."""
    original = vars(owner).get(name, _MISSING)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _place(owner: type | ModuleType, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    return f"{owner.__module__}.{owner.__qualname__}.{name}"
