"""A simulated second device, whose tensors are in main memory.

It refuses to mix devices by torch's rules: only copies move data between devices, and an operation
on the device takes nothing from the CPU except zero-dimensional tensors and indices. So code that
would fail with a GPU fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

# Every build of torch has this device type, and none initialises anything for it.
DEVICE = torch.device("lazy:0")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class OtherDeviceTensor(torch.Tensor):
    """A tensor of the second device."""

    cpu_tensor: torch.Tensor

    @staticmethod
    def __new__(cls, cpu_tensor: torch.Tensor) -> OtherDeviceTensor:
        new = torch.Tensor._make_wrapper_subclass(
            cls,
            cpu_tensor.size(),
            cpu_tensor.stride(),
            cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype,
            device=DEVICE,
        )
        new.cpu_tensor = cpu_tensor
        return new

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OtherDeviceTensor({self.cpu_tensor})"

    def tolist(self) -> Any:
        return self.cpu_tensor.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _CheckedDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    on_device = any(isinstance(tensor, OtherDeviceTensor) for tensor in tensors)
    if func not in _COPIES:
        _check(func, args, tensors)
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif func is torch.ops.aten.copy_.default:
        on_device = isinstance(args[0], OtherDeviceTensor)
    with torch._C._DisableTorchDispatch():
        plain_args, plain_kwargs = tree_map(_unwrapped, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
    if func._schema.is_mutable:  # an in-place operation returns its own argument
        originals = {id(_unwrapped(tensor)): tensor for tensor in tensors}
        return tree_map(lambda t: originals.get(id(t), _wrapped(t, on_device)), result)
    return tree_map(lambda t: _wrapped(t, on_device), result)


def _check(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    if func._schema.name in _INDEXING and isinstance(args[0], OtherDeviceTensor):
        indices = [t for t in args[1] if t is not None]
        tensors = [t for t in tensors if all(t is not index for index in indices)]
    devices = {t.device.type for t in tensors if t.ndim or isinstance(t, OtherDeviceTensor)}
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got {sorted(devices)}"
        )


def _unwrapped(value: Any) -> Any:
    return value.cpu_tensor if isinstance(value, OtherDeviceTensor) else value


def _wrapped(value: Any, on_device: bool) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, OtherDeviceTensor)
    return OtherDeviceTensor(value) if on_device and is_plain else value


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Simulate a second device within the block."""
    with _CheckedDispatch():
        yield DEVICE
