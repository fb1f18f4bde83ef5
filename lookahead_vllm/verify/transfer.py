"""Copies from the host to a device that do not wait for the device."""

from typing import Any

import torch
from numpy.typing import NDArray


def staged(array: NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The array as a host tensor from which a copy to `device` can be asynchronous.

    For CUDA it is a copy in pinned memory: a copy from pageable memory waits for the stream. For
    other devices it shares the array's memory.
    """
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def to_device(array: NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host array to `device` in stream order, without waiting for the device.

    On a CPU, the result shares the array's memory.
    """
    return staged(array, device).to(device, non_blocking=True)
