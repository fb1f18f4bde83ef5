"""The compiled signatures of the package's numba kernels."""

import sys
from collections.abc import Iterator

from numba.core.dispatcher import Dispatcher

Signatures = dict[str, list[str]]
"""Argument types by kernel."""


def kernels() -> Iterator[tuple[str, Dispatcher]]:
    """The kernels of all imported modules, with their dotted names."""
    for module in [m for name, m in sys.modules.items() if name.startswith("lookahead_vllm.")]:
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher) and value.__module__ == module.__name__:
                yield f"{module.__name__}.{name}", value


def compiled() -> Signatures:
    """The signatures that this process compiled or loaded from the cache."""
    return {name: list(map(str, kernel.signatures)) for name, kernel in kernels()}


def compiled_since(before: Signatures) -> Signatures:
    """The signatures that are not in `before`."""
    new = {
        name: [signature for signature in signatures if signature not in before.get(name, ())]
        for name, signatures in compiled().items()
    }
    return {name: signatures for name, signatures in new.items() if signatures}


def reset_kernels() -> None:
    """Drop all compiled signatures from memory, as in a new process."""
    for _, kernel in kernels():
        kernel._make_finalizer()()
        kernel._reset_overloads()
        kernel.overloads.clear()
    assert not any(compiled().values())
