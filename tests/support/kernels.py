"""Which of the package's kernels are compiled, and for which arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from numba.core.dispatcher import Dispatcher

Signatures = dict[str, list[str]]


def kernels() -> Iterator[tuple[str, Dispatcher]]:
    """All that are loaded, by module and name."""
    for module in [m for name, m in sys.modules.items() if name.startswith("lookahead_vllm.")]:
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher) and value.__module__ == module.__name__:
                yield f"{module.__name__}.{name}", value


def compiled() -> Signatures:
    """What was compiled in this process, or read from the folder of kernels, by kernel."""
    return {name: list(map(str, kernel.signatures)) for name, kernel in kernels()}


def new_since(before: Signatures) -> Signatures:
    """What was compiled later."""
    new = {
        name: [signature for signature in signatures if signature not in before.get(name, ())]
        for name, signatures in compiled().items()
    }
    return {name: signatures for name, signatures in new.items() if signatures}


def forget() -> None:
    """Begin anew, as a process does."""
    for _, kernel in kernels():
        kernel._make_finalizer()()
        kernel._reset_overloads()
        kernel.overloads.clear()
    assert not any(compiled().values())
