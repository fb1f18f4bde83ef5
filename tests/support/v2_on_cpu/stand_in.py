"""What stands in for a Triton kernel, and the table of all of them."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numba
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Grid = tuple[int, ...]

STAND_INS: dict[str, StandIn] = {}
"""By the kernel's name below `vllm.v1.worker`, as in "gpu.sample.min_p._min_p_kernel"."""

jit = numba.njit(cache=True, nogil=True, error_model="numpy")
"""Compiles a function and keeps it beside its file.

numba compiles again when the function's own file has changed, so compiled functions call none of
another file.
"""


class StandIn:
    """Is launched like a kernel: `stand_in[grid](*arguments, **constants)`.

    Parameters
    ----------
    function
        Takes the grid, the kernel's arguments in its order and those constants that it names.
    of_tensors : bool
        Tensors reach the function as they are; otherwise as their memory.
    """

    def __init__(self, function: Callable[..., None], of_tensors: bool = False) -> None:
        self._function = function
        self._of_tensors = of_tensors
        self._names = frozenset(inspect.signature(function).parameters)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: Any, **constants: Any) -> None:
        if not self._of_tensors:
            arguments = tuple(memory(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        named = {name: value for name, value in constants.items() if name in self._names}
        self._function(grid, *arguments, **named)


def memory(tensor: torch.Tensor) -> Array:
    """A pointer as a flat array: the tensor's memory from its first element to its last.

    Shared with the tensor, except in bfloat16, which NumPy lacks: that is a read-only float32 copy.
    """
    if not tensor.is_contiguous():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        tensor = tensor.as_strided((last + 1,), (1,))
    if tensor.dtype == torch.bfloat16:
        copy = tensor.float().numpy().reshape(-1)
        copy.flags.writeable = False
        return copy
    return tensor.numpy().reshape(-1)


def stand_in(kernel: str, of_tensors: bool = False) -> Callable[[Any], Any]:
    """Enter the decorated function in `STAND_INS`; see `StandIn`."""

    def register(function: Any) -> Any:
        STAND_INS[kernel] = StandIn(function, of_tensors)
        return function

    return register


def home_of(kernel: str) -> tuple[Any, str]:
    """The module of vLLM that holds a kernel of the table, and the kernel's name in it."""
    module, _, name = kernel.rpartition(".")
    return importlib.import_module(f"vllm.v1.worker.{module}"), name


def replace_kernels() -> None:
    """Put the stand-ins in the place of vLLM's kernels, in this process."""
    for kernel, replacement in STAND_INS.items():
        module, name = home_of(kernel)
        assert hasattr(module, name), kernel
        setattr(module, name, replacement)
