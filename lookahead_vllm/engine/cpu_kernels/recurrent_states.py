"""The kernels that keep recurrent states at the ends of blocks, where prefixes are cached.

A request's states are in columns of its block table: the running state's, and one for each draft
token. Its windows of inputs are all in the running state's.
"""

from typing import Any

import numpy as np

from lookahead_vllm.engine.cpu_kernels.block_tables import _bytes_at, _integers_at
from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, replaces


@replaces("gpu.model_states.mamba_hybrid.preprocess_mamba_align_fused_kernel")
@kernel
def choose_columns(
    grid: Grid,
    slots: Array,
    columns: Array,
    num_computed: Array,
    starts: Array,
    accepted: Array,
    sources: Array,
    offsets: Array,
    num_requests: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    for request in range(num_requests):
        slot = slots[request]
        before = columns[slot]
        sources[slot], offsets[slot] = before, max(accepted[slot] - 1, 0)
        end = num_computed[slot] + starts[request + 1] - starts[request]
        columns[slot] = (end + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
        if before >= 0 and before != columns[slot]:
            accepted[slot] = 1


@replaces("mamba_utils.precopy_mamba_align_fused_kernel")
@kernel
def move_to_columns(
    grid: Grid,
    columns: Array,
    sources: Array,
    offsets: Array,
    tables: Array,
    table_stride: int,
    addresses: Array,
    strides: Array,
    element_sizes: Array,
    sizes: Array,
    lengths: Array,
    groups: Array,
    num_channels: Array,
    channel_strides: Array,
    slots: Array,
    num_requests: int,
    CONV_STATE_DIM_FIRST: bool,
) -> None:
    states = (tables, table_stride, addresses, strides, element_sizes, sizes, lengths, groups)
    channels = (num_channels, channel_strides, CONV_STATE_DIM_FIRST)
    for request in range(num_requests):
        slot = slots[request]
        if slot < 0 or sources[slot] < 0 or sources[slot] == columns[slot]:
            continue
        _copy(slot, sources[slot], columns[slot], offsets[slot], states, channels)


@replaces("mamba_utils.postprocess_mamba_fused_kernel")
@kernel
def keep_at_block_ends(
    grid: Grid,
    accepted: Array,
    columns: Array,
    num_scheduled: None,
    num_computed: Array,
    num_drafted: None,
    tables: Array,
    table_stride: int,
    addresses: Array,
    strides: Array,
    element_sizes: Array,
    sizes: Array,
    lengths: Array,
    groups: Array,
    num_channels: Array,
    channel_strides: Array,
    out_accepted: Array,
    slots: Array,
    num_requests: int,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,
) -> None:
    """As Model Runner V2 launches it: `num_computed` counts the step's accepted tokens."""
    states = (tables, table_stride, addresses, strides, element_sizes, sizes, lengths, groups)
    channels = (num_channels, channel_strides, CONV_STATE_DIM_FIRST)
    for request in range(num_requests):
        slot = slots[request]
        if slot < 0:
            continue
        first = num_computed[slot] - accepted[slot] + 1
        end = num_computed[slot] // block_size * block_size
        source, target = columns[slot], end // block_size - 1
        if end < first:
            continue
        if source == target:
            out_accepted[slot] = 1
            if end == first:
                continue
        _copy(slot, source, target, end - first, states, channels)


@kernel
def _copy(
    slot: int, source: int, target: int, offset: int, states: tuple[Any, ...], channels: Any
) -> None:
    """Copy the states after `offset` draft tokens, and the windows, which have `lengths` inputs."""
    tables, table_stride, addresses, strides, element_sizes, sizes, lengths, groups = states
    num_channels, channel_strides, channels_first = channels
    for i in range(len(addresses)):
        table = np.uint64(tables[groups[i]] + 4 * slot * table_stride)
        blocks = _integers_at(table, max(source + offset, target) + 1)
        runs, stride, count, since = 1, 0, sizes[i], addresses[i]
        if lengths[i] == 0:
            since += blocks[source + offset] * strides[i]
        else:
            inputs = sizes[i]
            if channels_first:
                runs, stride, inputs = num_channels[i], channel_strides[i], 1
            since += blocks[source] * strides[i] + offset * inputs * element_sizes[i]
            count = (lengths[i] - offset) * inputs
        to = addresses[i] + blocks[target] * strides[i]
        for run in range(runs):
            read = _bytes_at(np.uint64(since + run * stride), count * element_sizes[i])
            written = _bytes_at(np.uint64(to + run * stride), len(read))
            for j in range(len(read)):  # in this order: a window may move within its slot
                written[j] = read[j]
