"""A second device for machines that have none: tensors that lie in memory and deny it.

torch refuses to mix devices, and so does this, by torch's rules: tensors of one number may come
from the CPU, and so may the indices of a tensor, but nothing else; only a copy goes from one to the
other. So code that would trip over a GPU trips here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DEVICE = torch.device(
    "lazy:0"
)  # a kind that every build of torch knows, and has nothing to start for
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Elsewhere(torch.Tensor):
    """A tensor of the other device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        new = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )
        new.held = held
        return new

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Strict(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    if func not in _COPIES:
        _check(func, args, tensors)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif func is torch.ops.aten.copy_.default:
        there = isinstance(args[0], Elsewhere)
    with torch._C._DisableTorchDispatch():
        plain_args, plain_kwargs = tree_map(_held, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
    if func._schema.is_mutable:  # who was written to is who comes back
        same = {id(_held(tensor)): tensor for tensor in tensors}
        return tree_map(lambda t: same.get(id(t), _placed(t, there)), result)
    return tree_map(lambda t: _placed(t, there), result)


def _check(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    if func._schema.name in _INDEXED and isinstance(args[0], Elsewhere):
        indices = [t for t in args[1] if t is not None]
        tensors = [t for t in tensors if all(t is not index for index in indices)]
    places = {t.device.type for t in tensors if t.ndim or isinstance(t, Elsewhere)}
    if len(places) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got {sorted(places)}"
        )


def _held(what: Any) -> Any:
    return what.held if isinstance(what, Elsewhere) else what


def _placed(what: Any, there: bool) -> Any:
    plain = isinstance(what, torch.Tensor) and not isinstance(what, Elsewhere)
    return Elsewhere(what) if there and plain else what


@contextmanager
def other_device() -> Iterator[torch.device]:
    """While this lasts, there is a second device."""
    with _Strict():
        yield DEVICE
