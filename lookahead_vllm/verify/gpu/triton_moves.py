"""Moves of K/V between cache slots on a GPU, for all layers at once, asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPE_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_ENTRIES = 128  # of a path, read at once


class PagedKVMover:
    """Copies slots in the caches of all layers that share one block table.

    Parameters
    ----------
    kv_caches : sequence of [num_blocks, num_kv_heads, block_size, width]
        One per layer, all of one device, shape, dtype and strides. These are vLLM's caches on CUDA,
        tokens or heads first, where K and V of one token and head are contiguous. The caches
        must not be reallocated.

    Raises
    ------
    ValueError
        The caches differ, or are not contiguous in the last dimension, or their elements do not
        have 1, 2 or 4 bytes.
    """

    def __init__(self, kv_caches: Sequence[Tensor]) -> None:
        first = kv_caches[0]
        for cache in kv_caches:
            layout = (cache.shape, cache.stride(), cache.dtype, cache.device)
            if layout != (first.shape, first.stride(), first.dtype, first.device):
                raise ValueError(
                    "the KV caches of one block table are alike; got "
                    f"{list(cache.shape)}, strides {cache.stride()}, and {list(first.shape)}, "
                    f"strides {first.stride()}"
                )
        if first.stride(3) != 1 or first.element_size() not in _DTYPE_OF_SIZE:
            raise ValueError(
                "a KV cache is contiguous in its last dimension, of 1, 2 or 4 bytes an element; "
                f"got strides {first.stride()}, {first.dtype}"
            )
        self._kv_caches = list(kv_caches)
        pointers = [cache.data_ptr() for cache in kv_caches]
        self._pointers = torch.tensor(pointers, dtype=torch.int64, device=first.device)

    @property
    def device(self) -> torch.device:
        """The device of the caches."""
        return self._kv_caches[0].device

    @property
    def bytes_of_a_slot(self) -> int:
        """The bytes of one slot in all layers."""
        first = self._kv_caches[0]
        return len(self._kv_caches) * first.shape[1] * first.shape[3] * first.element_size()

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy the K/V of slot `src[i]` to slot `dst[i]` in every layer; reads all, then writes.

        Moves of a slot to itself are skipped on the device.

        Parameters
        ----------
        src, dst : int64 [m]
            Each is `block * block_size + offset`. On the CPU or on the caches' device.

        Raises
        ------
        ValueError
            Another dtype, different lengths, or slots that the caches do not have. Slots that are
            on the device are not checked, because that would synchronise.
        """
        first = self._kv_caches[0]
        num_blocks, heads, block_size, width = first.shape
        if src.dtype != torch.int64 or dst.dtype != torch.int64 or src.shape != dst.shape:
            raise ValueError("src and dst are int64 and equally long")
        if not len(src):
            return
        slots = torch.stack((src, dst))
        if slots.device.type == "cpu":
            end = num_blocks * block_size
            if slots.min() < 0 or slots.max() >= end:
                raise ValueError(f"slots lie in 0..{end - 1}; got {slots.tolist()}")
            slots = slots.to(first.device)
        shape = (len(src), len(self._kv_caches), heads, width)
        copies = torch.empty(shape, dtype=_DTYPE_OF_SIZE[first.element_size()], device=first.device)
        for is_write in (False, True):
            _copy[shape[:3]](
                self._pointers, copies, slots[0], slots[1], *first.stride()[:3],
                LAYERS=shape[1], HEADS=heads, BLOCK_SIZE=block_size, WIDTH=width,
                PADDED=triton.next_power_of_2(width), WRITE=is_write, num_warps=1,
            )  # fmt: skip

    def read(self, slots: Tensor) -> Tensor:
        """The contents of these slots, int64 [m], in all layers: uint8 [m, bytes of a slot]."""
        blocks, keys = self._blocks_and_keys(slots)
        parts = [cache[blocks, :, keys] for cache in self._kv_caches]
        return torch.stack(parts, dim=1).flatten(1).view(torch.uint8)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Overwrite these slots, int64 [m], with the result of `read` of a cache like this one."""
        blocks, keys = self._blocks_and_keys(slots)
        first = self._kv_caches[0]
        layers = values.view(first.dtype).unflatten(1, (-1, first.shape[1], first.shape[3]))
        for cache, own in zip(self._kv_caches, layers.unbind(1), strict=True):
            cache[blocks, :, keys] = own

    def _blocks_and_keys(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots, size = slots.to(self.device), self._kv_caches[0].shape[2]
        return slots // size, slots % size

    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        """Move the K/V of the accepted paths of r requests, see `walk.Walk`, in one launch.

        Makes no copies, does not wait for the device, and always has the same launch for the same
        shape, so it can be captured in a CUDA graph. Moves of a slot to itself are skipped.

        Parameters
        ----------
        src, dst : int64 [r, width], on the caches' device
            The slots of `origins` and `targets`. No move of a row reads a slot that an earlier one
            of the row has written, and rows share no slots. They are not checked.

        Raises
        ------
        ValueError
            Another dtype, shape or device.
        """
        first = self._kv_caches[0]
        if (
            src.dtype != torch.int64 or dst.dtype != torch.int64
            or src.shape != dst.shape or src.ndim != 2
            or src.device != first.device or dst.device != first.device
        ):  # fmt: skip
            raise ValueError(
                f"src and dst are int64 [r, width] on {first.device}; got {src.dtype} "
                f"{list(src.shape)} on {src.device}, {dst.dtype} {list(dst.shape)} on {dst.device}"
            )
        if not src.numel():
            return
        heads, block_size, width = first.shape[1:]
        _move_paths[(len(src), len(self._kv_caches), heads)](
            self._pointers, first.view(_DTYPE_OF_SIZE[first.element_size()]),
            src.contiguous(), dst.contiguous(), src.shape[1], *first.stride()[:3],
            BLOCK=_ENTRIES, BLOCK_SIZE=block_size, WIDTH=width,
            PADDED=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


class PagedKVMovers:
    """Copies slots in the caches of layers that share one block table and differ in their layout.

    Parameters
    ----------
    kv_caches : sequence of [num_blocks, num_kv_heads, block_size, width]
        As in `PagedKVMover`; heads, width and strides may differ from layer to layer.
    """

    def __init__(self, kv_caches: Sequence[Tensor]) -> None:
        alike: dict[Any, list[Tensor]] = {}
        for cache in kv_caches:
            alike.setdefault((cache.shape, cache.stride(), cache.dtype), []).append(cache)
        self._movers = [PagedKVMover(caches) for caches in alike.values()]

    @property
    def device(self) -> torch.device:
        """The device of the caches."""
        return self._movers[0].device

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See `PagedKVMover.move`."""
        for mover in self._movers:
            mover.move(src, dst)

    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        """See `PagedKVMover.move_paths`; one launch for each layout."""
        for mover in self._movers:
            mover.move_paths(src, dst)

    def read(self, slots: Tensor) -> Tensor:
        """See `PagedKVMover.read`; layers are in the order of their layouts."""
        return torch.cat([mover.read(slots) for mover in self._movers], dim=1)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """See `PagedKVMover.write`."""
        sizes = [mover.bytes_of_a_slot for mover in self._movers]
        for mover, own in zip(self._movers, values.split(sizes, dim=1), strict=True):
            mover.write(slots, own.contiguous())


@triton.jit
def _copy(
    pointers, copies, src, dst, block_stride, head_stride, slot_stride,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Copy one slot, layer and head out of the cache, or with WRITE into it."""
    move, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(src + move), tl.load(dst + move)
    if source == target:
        return
    slot = target if WRITE else source
    cache = tl.load(pointers + layer).to(tl.pointer_type(copies.dtype.element_ty))
    base = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    base += head.to(tl.int64) * head_stride  # a large cache has more than 2**31 elements
    offset = tl.arange(0, PADDED)
    in_width = offset < WIDTH
    copy = copies + ((move * LAYERS + layer).to(tl.int64) * HEADS + head) * WIDTH + offset
    if WRITE:
        tl.store(cache + base + offset, tl.load(copy, mask=in_width), mask=in_width)
    else:
        tl.store(copy, tl.load(cache + base + offset, mask=in_width), mask=in_width)


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
