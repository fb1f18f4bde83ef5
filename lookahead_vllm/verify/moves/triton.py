"""Moves of K/V between cache slots on a GPU, for all layers at once, asynchronously."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from lookahead_vllm.verify.moves import SlotMover

_DTYPE_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_ENTRIES = 128  # of a path, read at once


class PagedKVMover(SlotMover):
    """Moves slots one after the other; never waits for the device.

    Slots are not checked, because that would synchronise. No move reads a slot that an earlier one
    of its request has written.

    Parameters
    ----------
    kv_caches : sequence of [num_blocks, num_kv_heads, block_size, width]
        One per layer; heads, width and strides may differ from layer to layer. These are vLLM's
        caches on CUDA, tokens or heads first, where K and V of one token and head are contiguous.
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
        moves = torch.stack((src, dst)).to(self.device)
        self.move_paths(*pad(moves, (1, 0))[:, None])  # the first entry stays where it is

    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        """There are always the same launches for the same shape, one for each layout of a cache,
        and no copies, so a CUDA graph can capture them."""
        assert src.dtype == dst.dtype == torch.int64 and src.device == dst.device == self.device
        assert src.shape == dst.shape and src.ndim == 2, (src.shape, dst.shape)
        if src.numel():
            for group in self._groups:
                group.move_paths(src.contiguous(), dst.contiguous())

    def _places(self, slots: Tensor) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        slots = slots.to(self.device)
        for cache in (cache for group in self._groups for cache in group.caches):
            yield cache, (slots // cache.shape[2], slice(None), slots % cache.shape[2])


def move_nothing(movers: Iterable[PagedKVMover]) -> None:
    """Move a slot of each cache to itself, so that no request waits for the compiler."""
    for mover in movers:
        first = torch.zeros(1, 1, dtype=torch.int64, device=mover.device)
        mover.move_paths(first, first)


class _Alike:
    """The caches of some layers, all of one device, shape, dtype and strides, as integers."""

    def __init__(self, caches: list[Tensor]) -> None:
        self.caches, first = caches, caches[0]
        self._pointers = torch.tensor(
            [cache.data_ptr() for cache in caches], dtype=torch.int64, device=first.device
        )

    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        first = self.caches[0]
        heads, block_size, width = first.shape[1:]
        _move_paths[(len(src), len(self.caches), heads)](
            self._pointers, first, src, dst, src.shape[1], *first.stride()[:3],
            BLOCK=_ENTRIES, BLOCK_SIZE=block_size, WIDTH=width,
            PADDED=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


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
