"""Moves of K/V between cache slots on a GPU, for all layers at once, asynchronously."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

_DTYPE_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_ENTRIES = 128  # of a path, read at once


class PagedKVMover:
    """Copies slots in the caches of all layers that share one block table.

    Parameters
    ----------
    kv_caches : sequence of [num_blocks, num_kv_heads, block_size, width]
        One per layer; heads, width and strides may differ from layer to layer. These are vLLM's
        caches on CUDA, tokens or heads first, where K and V of one token and head are contiguous.
        The caches must not be reallocated.
    """

    def __init__(self, kv_caches: Sequence[Tensor]) -> None:
        alike: dict[Any, list[Tensor]] = {}
        for cache in kv_caches:
            assert cache.stride(3) == 1 and cache.element_size() in _DTYPE_OF_SIZE, cache.dtype
            bits = cache.view(_DTYPE_OF_SIZE[cache.element_size()])
            alike.setdefault((bits.shape, bits.stride(), bits.dtype), []).append(bits)
        self.device = kv_caches[0].device
        self._groups = [_Alike(caches) for caches in alike.values()]

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy the K/V of slot `src[i]` to slot `dst[i]` in every layer, one after the other.

        Parameters
        ----------
        src, dst : int64 [m], on the CPU or on the caches' device
            Each is `block * block_size + offset`. No move reads a slot that an earlier one has
            written. They are not checked, because that would synchronise.
        """
        moves = torch.stack((src, dst)).to(self.device)
        self.move_paths(*pad(moves, (1, 0))[:, None])  # the first entry stays where it is

    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        """Move the K/V of the accepted paths of r requests, see `walk.Walk`.

        Makes no copies, does not wait for the device, and always has the same launches for the same
        shape, one for each layout, so they can be captured in a CUDA graph. Moves of a slot to
        itself are skipped.

        Parameters
        ----------
        src, dst : int64 [r, width], on the caches' device
            The slots of `origins` and `targets`. No move of a request reads a slot that an earlier
            one of the request has written, and requests share no slots. They are not checked.
        """
        assert src.dtype == dst.dtype == torch.int64 and src.device == dst.device == self.device
        assert src.shape == dst.shape and src.ndim == 2, (src.shape, dst.shape)
        if src.numel():
            for group in self._groups:
                group.move_paths(src.contiguous(), dst.contiguous())

    def read(self, slots: Tensor) -> Tensor:
        """The contents of these slots, int64 [m], in all layers: uint8 [m, bytes of a slot]."""
        slots = slots.to(self.device)
        return torch.cat([group.read(slots) for group in self._groups], dim=1)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Overwrite these slots, int64 [m], with the result of `read` of a cache like this one."""
        slots, sizes = slots.to(self.device), [group.bytes_of_a_slot for group in self._groups]
        for group, own in zip(self._groups, values.split(sizes, dim=1), strict=True):
            group.write(slots, own.contiguous())


def move_nothing(movers: Iterable[PagedKVMover]) -> None:
    """Move a slot of each cache to itself, so that no request waits for the compiler."""
    for mover in movers:
        first = torch.zeros(1, 1, dtype=torch.int64, device=mover.device)
        mover.move_paths(first, first)


class _Alike:
    """The caches of some layers, all of one device, shape, dtype and strides, as integers."""

    def __init__(self, caches: list[Tensor]) -> None:
        self._caches, first = caches, caches[0]
        self._pointers = torch.tensor(
            [cache.data_ptr() for cache in caches], dtype=torch.int64, device=first.device
        )
        self.bytes_of_a_slot = len(caches) * first.shape[1] * first.shape[3] * first.element_size()

    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        first = self._caches[0]
        heads, block_size, width = first.shape[1:]
        _move_paths[(len(src), len(self._caches), heads)](
            self._pointers, first, src, dst, src.shape[1], *first.stride()[:3],
            BLOCK=_ENTRIES, BLOCK_SIZE=block_size, WIDTH=width,
            PADDED=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip

    def read(self, slots: Tensor) -> Tensor:
        blocks, keys = slots // self._caches[0].shape[2], slots % self._caches[0].shape[2]
        parts = [cache[blocks, :, keys] for cache in self._caches]
        return torch.stack(parts, dim=1).flatten(1).view(torch.uint8)

    def write(self, slots: Tensor, values: Tensor) -> None:
        first = self._caches[0]
        blocks, keys = slots // first.shape[2], slots % first.shape[2]
        layers = values.view(first.dtype).unflatten(1, (-1, first.shape[1], first.shape[3]))
        for cache, own in zip(self._caches, layers.unbind(1), strict=True):
            cache[blocks, :, keys] = own


@triton.jit(do_not_specialize=["moves"], do_not_specialize_on_alignment=["src", "dst"])
def _move_paths(
    pointers, typed_cache, src, dst, moves, block_stride, head_stride, slot_stride,
    BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Move the slots of one request, layer and head, one after the other.

    Each move waits for memory twice, so none is visited after the last one that moves anything.
    """
    request, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    src += request * moves
    dst += request * moves
    last = 0
    for start in range(0, moves, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        source = tl.load(src + entry, mask=entry < moves, other=0)
        target = tl.load(dst + entry, mask=entry < moves, other=0)
        last = tl.maximum(last, tl.max(tl.where(source != target, entry, 0), 0))
    cache = tl.load(pointers + layer).to(tl.pointer_type(typed_cache.dtype.element_ty))
    offset = tl.arange(0, PADDED)
    in_width = offset < WIDTH
    cache += head.to(tl.int64) * head_stride + offset
    for move in range(1, last + 1):  # a root stays where it is
        source, target = tl.load(src + move), tl.load(dst + move)
        if source != target:
            block, place = source // BLOCK_SIZE, source % BLOCK_SIZE
            values = tl.load(cache + block * block_stride + place * slot_stride, mask=in_width)
            block, place = target // BLOCK_SIZE, target % BLOCK_SIZE
            # A later move of the request may write what this one reads.
            tl.debug_barrier()
            tl.store(cache + block * block_stride + place * slot_stride, values, mask=in_width)
