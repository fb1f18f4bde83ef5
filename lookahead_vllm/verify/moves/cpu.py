"""Moves of K/V between slots of caches on a CPU."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead_vllm.verify import native
from lookahead_vllm.verify.moves import SlotMover
from lookahead_vllm.verify.native import fields, i64, pointer


class HostMover(SlotMover):
    """Moves slots of caches on a CPU, each of which has `num_slots`."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def move(self, src: Tensor, dst: Tensor) -> None:
        assert src.dtype == dst.dtype == torch.int64 and src.shape == dst.shape
        moved = np.flatnonzero(src.numpy() != dst.numpy())
        src, dst = (torch.from_numpy(slots.numpy()[moved]) for slots in (src, dst))
        if not len(src):
            return
        slots = torch.cat((src, dst))
        assert slots.min() >= 0 and slots.max() < self._num_slots, slots.tolist()
        self._copy(src, dst)

    def move_paths(self, src: Tensor, dst: Tensor) -> None:
        self.move(src.flatten(), dst.flatten())

    def _copy(self, src: Tensor, dst: Tensor) -> None:
        """The moves of `move`, checked and without those of a slot to itself."""
        for (view, source), (_, to) in zip(self._places(src), self._places(dst), strict=True):
            view[to] = view[source]


class LatentMover(HostMover):
    """Moves the latents of latent attention (MLA), which hold keys and values in one.

    Parameters
    ----------
    caches : sequence of [num_blocks, block_size, width]
        One per layer. Any strides; block sizes and dtypes may differ.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        super().__init__(min(cache.shape[0] * cache.shape[1] for cache in caches))
        self._caches = list(caches)

    def _places(self, slots: Tensor) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        for cache in self._caches:
            yield cache, (slots // cache.shape[1], slots % cache.shape[1])


class LayerCache(ctypes.Structure):
    """`LayerCache` of `cpu.cpp`: the KV cache of one layer; strides in bytes."""

    _fields_ = [("data", pointer), *fields(i64, "block", "head", "heads", "head_size")]


class KVMover(HostMover):
    """Moves the K/V of all heads.

    Parameters
    ----------
    kv_caches : sequence of [num_blocks, num_kv_heads, block_size, 2 * head_size]
        One per layer, of 2 or 4 bytes per element, in vLLM's CPU layout (see TreeCall).
        The first two dimensions may be strided.
    block_size : int
        Slots per block.
    packed : bool
        The caches have vLLM's layout for `amx` and 2 bytes per element.
    """

    def __init__(self, kv_caches: Sequence[Tensor], block_size: int, packed: bool) -> None:
        for cache in kv_caches:
            _, _, size, width = cache.shape
            assert size == block_size and width % 2 == 0, cache.shape
            assert cache.stride()[2:] == (width, 1), cache.stride()
        element_sizes = {cache.element_size() for cache in kv_caches}
        assert len(element_sizes) <= 1 and element_sizes <= ({2} if packed else {2, 4})
        super().__init__(block_size * min((len(c) for c in kv_caches), default=0))
        self._library = native.load()
        self._kv_caches = list(kv_caches)
        self._block_size = block_size
        self._packed = packed
        self._element_size = next(iter(element_sizes), 4)
        self._layers = (LayerCache * len(self._kv_caches))(
            *(
                LayerCache(
                    cache.data_ptr(),
                    *(stride * cache.element_size() for stride in cache.stride()[:2]),
                    cache.shape[1],
                    cache.shape[3] // 2,
                )
                for cache in self._kv_caches
            )
        )

    def _copy(self, src: Tensor, dst: Tensor) -> None:
        self._library.lookahead_move_kv(
            self._layers, len(self._layers), self._block_size, self._element_size,
            len(src), src.data_ptr(), dst.data_ptr(), torch.get_num_threads(), self._packed,
        )  # fmt: skip

    def _places(self, slots: Tensor) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        blocks, keys = slots // self._block_size, slots % self._block_size
        for cache in self._kv_caches:
            flat = cache.flatten(2)  # a view: the last two dimensions are contiguous
            for part in keys_and_values(flat, cache.shape[3] // 2, self._block_size, self._packed):
                yield part, (blocks, slice(None), keys // part.shape[3], keys % part.shape[3])


def keys_and_values(
    blocks: Tensor, head_size: int, block_size: int, packed: bool
) -> tuple[Tensor, Tensor]:
    """Views of the K and the V of blocks, indexed in the same way for both layouts.

    `blocks` is [blocks, kv_heads, 2 * block_size * head_size]; `packed` is as in TreeCall. K and V
    are [blocks, kv_heads, keys / p, p, head_size / q, q] each: p keys and q head dimensions are
    stored together; both are 1 unless `packed`.
    """
    keys, values = blocks.split(block_size * head_size, dim=-1)
    if not packed:
        keys = keys.unflatten(-1, (head_size, 1, block_size, 1)).permute(0, 1, 4, 5, 2, 3)
        return keys, values.unflatten(-1, (block_size, 1, head_size, 1))
    keys = keys.unflatten(-1, (block_size // 16, head_size // 2, 16, 2)).permute(0, 1, 2, 4, 3, 5)
    values = values.unflatten(-1, (head_size // 16, block_size // 2, 16, 2))
    return keys, values.permute(0, 1, 3, 5, 2, 4)
