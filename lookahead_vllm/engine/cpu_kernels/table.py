"""The table of kernels for CPUs, and how they take the place of vLLM's.

Model Runner V2 launches kernels in Triton, which has no compiler for CPUs in vLLM's builds. Each
function of this folder computes what one of these kernels computes; `replaces` names it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from vllm.triton_utils import triton

from lookahead_vllm.draft.jit import kernel as kernel

Array = NDArray[Any]
Grid = tuple[int, ...]

KERNELS: dict[str, CPUKernel] = {}
"""By the name of vLLM's kernel below `vllm.v1.worker`, as in "gpu.sample.min_p._min_p_kernel"."""

_MODULES = (
    "block_tables",
    "input_batch",
    "logits",
    "logprobs",
    "recurrent_states",
    "sampling",
    "speculator",
)
"""The modules of this folder that fill the table."""


class CPUKernel:
    """Is launched as in Triton: `kernel[grid](*arguments, **constants)`.

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

    Shared with the tensor, except in bfloat16, which NumPy lacks, and float16, which numba lacks:
    these are read-only float32 copies.
    """
    if not tensor.is_contiguous():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        tensor = tensor.as_strided((last + 1,), (1,))
    if tensor.dtype in (torch.bfloat16, torch.float16):
        copy = tensor.float().numpy().reshape(-1)
        copy.flags.writeable = False
        return copy
    return tensor.numpy().reshape(-1)


def replaces(name: str, of_tensors: bool = False) -> Callable[[Any], Any]:
    """Enter the decorated function in `KERNELS`; see `CPUKernel`."""

    def register(function: Any) -> Any:
        KERNELS[name] = CPUKernel(function, of_tensors)
        return function

    return register


def load() -> dict[str, CPUKernel]:
    """Return the whole table."""
    for name in _MODULES:
        importlib.import_module(f"{__package__}.{name}")
    return KERNELS


def home_of(name: str) -> tuple[Any, str]:
    """The module of vLLM that holds a kernel of the table, and the kernel's name in it."""
    module, _, kernel_name = name.rpartition(".")
    return importlib.import_module(f"vllm.v1.worker.{module}"), kernel_name


@functools.cache
def install() -> None:
    """Put the table's kernels in the place of vLLM's, in this process."""
    # vLLM's placeholder for a missing Triton lacks this function.
    triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
    for name, replacement in load().items():
        module, kernel_name = home_of(name)
        assert hasattr(module, kernel_name), name
        setattr(module, kernel_name, replacement)
