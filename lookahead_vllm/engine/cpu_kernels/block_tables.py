"""The kernels of block tables and of others that follow addresses.

They take what vLLM's kernels take; see `input_batch.py` for slots and starts.
"""

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, replaces


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address, uint64, as a pointer to bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.uint64), generate


@kernel
def _bytes_at(address: np.uint64, count: int) -> Array:
    return numba.carray(_pointer(address), (count,))


@kernel
def _integers_at(address: np.uint64, count: int) -> Array:
    return _bytes_at(address, count * 4).view(np.int32)


@replaces("gpu.buffer_utils._apply_write_kernel")
def apply_writes(
    grid: Grid,
    target: Array,
    stride: Any,
    rows: Array,
    columns: Array,
    contents: Array,
    ends: Array,
    groups: Array | None,
    MULTI_GROUP: bool = False,
) -> None:
    """With several groups, `target` and `stride` hold the address and the stride of each."""
    if MULTI_GROUP:
        _write_groups(grid[0], target, stride, rows, columns, contents, ends, groups)
    else:
        _write(grid[0], target, stride, rows, columns, contents, ends)


@kernel
def _write(
    num_writes: int,
    target: Array,
    stride: int,
    rows: Array,
    columns: Array,
    contents: Array,
    ends: Array,
) -> None:
    start = 0
    for write in range(num_writes):
        first = rows[write] * stride + columns[write]
        for i in range(ends[write] - start):
            target[first + i] = contents[start + i]
        start = ends[write]


@kernel
def _write_groups(
    num_writes: int,
    targets: Array,
    strides: Array,
    rows: Array,
    columns: Array,
    contents: Array,
    ends: Array,
    groups: Array,
) -> None:
    start = 0
    for write in range(num_writes):
        length = ends[write] - start
        first = rows[write] * strides[groups[write]] + columns[write]
        target = _integers_at(targets[groups[write]], first + length)
        for i in range(length):
            target[first + i] = contents[start + i]
        start = ends[write]


@replaces("gpu.block_table._gather_block_tables_kernel")
@kernel
def gather_block_tables(
    grid: Grid,
    slots: Array,
    sources: Array,
    targets: Array,
    strides: Array,
    num_blocks: Array,
    num_blocks_stride: int,
    num_requests: int,
    num_computed: Any = None,
    reaches: Any = None,
    block_sizes: Any = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """0.33 replaces the blocks that a sliding window has passed by the null block."""
    for group in range(grid[0]):
        stride = strides[group]
        target = _integers_at(targets[group], grid[1] * stride)
        target[num_requests * stride :] = 0
        for request in range(num_requests):
            slot = slots[request]
            source = _integers_at(sources[group], (slot + 1) * stride)
            num_passed = 0
            if reaches is not None and MASK_SLIDING_WINDOW and reaches[group] > 0:
                num_passed = max(num_computed[slot] - reaches[group], 0) // block_sizes[group]
            for i in range(num_blocks[group * num_blocks_stride + slot]):
                block = source[slot * stride + i] if i >= num_passed else 0
                target[request * stride + i] = block


@replaces("gpu.block_table._compute_slot_mappings_kernel")
@kernel
def compute_slot_mappings(
    grid: Grid,
    max_tokens: int,
    slots: Array,
    starts: Array,
    positions: Array,
    tables: Array,
    strides: Array,
    block_sizes: Array,
    is_enabled: Array,
    is_sharded: Array,
    mappings: Array,
    mappings_stride: int,
    rank: int,
    CP_SIZE: int = 1,
    PAD_ID: int = -1,
) -> None:
    """The places of a group's tokens in the KV cache; without a block size they have none."""
    if CP_SIZE != 1:
        raise NotImplementedError("contexts are not split over ranks on a CPU")
    num_requests = grid[1] - 1
    for group in range(grid[0]):
        stride = strides[group]
        block_size = block_sizes[group] if is_enabled[group] else 0
        mapping = mappings[group * mappings_stride : group * mappings_stride + max_tokens]
        for request in range(num_requests):
            slot, start, end = slots[request], starts[request], starts[request + 1]
            if slot < 0 or block_size == 0:
                mapping[start:end] = PAD_ID
                continue
            table = _integers_at(tables[group], (slot + 1) * stride)
            for row in range(start, end):
                block = table[slot * stride + positions[row] // block_size]
                mapping[row] = block * block_size + positions[row] % block_size
        mapping[starts[num_requests] :] = PAD_ID


@replaces("gpu.model_states.prompt_embeds._apply_prompt_embeds_kernel", of_tensors=True)
def apply_prompt_embeds(
    grid: Grid,
    target: torch.Tensor,
    target_stride: int,
    embeds: torch.Tensor,
    masks: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
    width: int,
) -> None:
    """Rows are copied as bytes, in any dtype."""
    assert target_stride == width
    row_bytes = width * target.element_size()
    tables = (tensor.numpy() for tensor in (embeds, masks, lens, slots, starts, num_computed))
    _overlay(grid[0], target.view(torch.uint8).numpy(), row_bytes, *tables)


@kernel
def _overlay(
    num_requests: int,
    target: Array,
    row_bytes: int,
    embeds: Array,
    masks: Array,
    lens: Array,
    slots: Array,
    starts: Array,
    num_computed: Array,
) -> None:
    for request in range(num_requests):
        slot = slots[request]
        first = num_computed[slot]
        num_rows = min(starts[request + 1] - starts[request], lens[slot] - first)
        for i in range(first, first + num_rows):
            if masks[slot] != 0 and _bytes_at(masks[slot], lens[slot])[i] != 0:
                continue  # a token, which the model embeds
            row = _bytes_at(embeds[slot], lens[slot] * row_bytes)
            target[starts[request] + i - first, :] = row[i * row_bytes : (i + 1) * row_bytes]


@replaces("utils._zero_kv_blocks_kernel")
@kernel
def zero_blocks(grid: Grid, addresses: Array, strides: Array, sizes: Array, blocks: Array) -> None:
    """Strides and sizes count words of four bytes."""
    for segment in range(grid[1]):
        for block in blocks[: grid[0]]:
            start = addresses[segment] + np.uint64(4 * strides[segment] * block)
            _bytes_at(start, 4 * sizes[segment])[:] = 0
