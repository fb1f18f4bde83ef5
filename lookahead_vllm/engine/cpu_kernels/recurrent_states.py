"""The kernels that keep recurrent states at the ends of blocks, where prefixes are cached.

A request's states are in columns of its block table: the running state's, and one for each draft
token. Its windows of inputs are all in the running state's.
"""

from __future__ import annotations

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
    for request in range(num_requests):
        slot = slots[request]
        if slot < 0 or sources[slot] < 0 or sources[slot] == columns[slot]:
            continue
        for state in range(grid[1]):
            table = np.uint64(tables[groups[state]] + 4 * slot * table_stride)
            _copy(
                *(table, sources[slot], columns[slot], offsets[slot]),
                *(addresses[state], strides[state], element_sizes[state], sizes[state]),
                *(lengths[state], num_channels[state], channel_strides[state]),
                CONV_STATE_DIM_FIRST,
            )


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
        for state in range(grid[1]):
            table = np.uint64(tables[groups[state]] + 4 * slot * table_stride)
            _copy(
                *(table, source, target, end - first),
                *(addresses[state], strides[state], element_sizes[state], sizes[state]),
                *(lengths[state], num_channels[state], channel_strides[state]),
                CONV_STATE_DIM_FIRST,
            )


@kernel
def _copy(
    table: np.uint64,
    source: int,
    target: int,
    offset: int,
    address: int,
    stride: int,
    element_size: int,
    size: int,
    length: int,
    num_channels: int,
    channel_stride: int,
    channels_first: bool,
) -> None:
    """Copy a layer's state after `offset` draft tokens, or its window of `length` > 0 inputs."""
    blocks = _integers_at(table, max(source + offset, target) + 1)
    to = address + blocks[target] * stride
    if length == 0:
        since, runs, run_stride, count = address + blocks[source + offset] * stride, 1, 0, size
    else:
        since = address + blocks[source] * stride
        if channels_first:
            runs, run_stride, inputs = num_channels, channel_stride, 1
        else:
            runs, run_stride, inputs = 1, 0, size
        since += offset * inputs * element_size
        count = (length - offset) * inputs
    for run in range(runs):
        begin = np.uint64(since + run * run_stride)
        written = _bytes_at(np.uint64(to + run * run_stride), count * element_size)
        read = _bytes_at(begin, count * element_size)
        for i in range(len(read)):  # in this order: a window may move within its slot
            written[i] = read[i]
