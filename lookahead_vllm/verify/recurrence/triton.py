"""Recurrent layers at the nodes of trees, and causal convolutions along their paths, in Triton.

A program owns a slice of one request's states, walks the request's rows in list order, and reads
the slots that it wrote. The arithmetic is that of vLLM's kernels for one token, with their blocks
and warps where they decide the order of a sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lookahead_vllm.verify.recurrence import Filter, GatedDelta, Mamba2, StateRows

KEYS_FIRST = False
"""The layout of gated_delta's states."""
_CHANNELS = 256
"""Channels of a convolution for one program."""
_VALUES = 16
"""Value dimensions of a gated delta net for one program. vLLM has 32, without a loop. The sums run
over keys, so their order does not depend on it."""
_ELEMENTS = 2048
"""Elements of a state or of a window that one program copies at a time."""
_BY_STEP = ["starts", "parents", "columns", "accepted"]
_DTYPE_OF_SIZE = {2: torch.int16, 4: torch.int32}


def convolution(x: Tensor, window: Tensor, own: Filter, trees: StateRows, out: Tensor) -> None:
    weight, bias, is_silu = own
    dim, width = weight.shape
    _convolve[(len(trees.starts) - 1, triton.cdiv(dim, _CHANNELS))](
        *_arguments(trees), x, x.stride(0), window, *window.stride(), weight, *weight.stride(),
        bias if bias is not None else weight, out,
        dim, WIDTH=width, HAS_BIAS=bias is not None, IS_SILU=is_silu,
        CHANNELS=_CHANNELS, num_warps=4, num_stages=1,
    )  # fmt: skip


def mamba2(state: Tensor, inputs: Mamba2, trees: StateRows, out: Tensor) -> None:
    x, dt, A, B, C, D, dt_bias = inputs
    heads, dim, dstate = state.shape[1:]
    block, warps = _mamba2_launch(dstate, state.device)
    _mamba2[(triton.cdiv(dim, block), len(trees.starts) - 1, heads)](
        *_arguments(trees), state, state.stride(0), x, *x.stride(), dt, *dt.stride(),
        A, A.stride(0), B, *B.stride(), C, *C.stride(),
        D, D.stride(0), dt_bias, dt_bias.stride(0), out, *out.stride(),
        heads, dim, dstate, heads // B.shape[1], DIMS=block,
        DSTATE=triton.next_power_of_2(dstate), num_warps=warps, num_stages=1,
    )  # fmt: skip


def gated_delta(state: Tensor, inputs: GatedDelta, trees: StateRows, out: Tensor) -> None:
    q, k, v, a, b, A_log, dt_bias = inputs
    heads, value_size, key_size = state.shape[1:]
    block = min(triton.next_power_of_2(value_size), _VALUES)
    _gated_delta[(triton.cdiv(value_size, block), len(trees.starts) - 1, heads)](
        *_arguments(trees), state, state.stride(0), q, *q.stride()[:2], k, *k.stride()[:2],
        v, *v.stride()[:2], a, *a.stride(), b, *b.stride(), A_log, dt_bias, out, *out.stride()[:2],
        key_size**-0.5, heads // q.shape[1], key_size, value_size,
        KEYS=triton.next_power_of_2(key_size), VALUES=block,
        num_warps=1, num_stages=1,
    )  # fmt: skip


class Mover:
    """Two launches for all layers."""

    def __init__(self, states: list[Tensor], windows: list[Tensor], width: int) -> None:
        self._tensors = states, windows
        self._tables = [
            torch.tensor([t.data_ptr() for t in layers], dtype=torch.int64, device=layers[0].device)
            if layers
            else None
            for layers in (states, windows)
        ]
        self._width = width

    def __call__(self, columns: Tensor, paths: Tensor, lengths: Tensor, stops: Tensor) -> None:
        (states, windows), (state_table, window_table) = self._tensors, self._tables
        requests, most = paths.shape
        arguments = (*_strided(columns), paths, paths.stride(0), paths.stride(1), lengths)
        if state_table is not None:
            first = states[0]
            size = first[0].numel()
            _move_states[(triton.cdiv(size, _ELEMENTS), requests, len(states))](
                *arguments, stops, state_table, first.view(_DTYPE_OF_SIZE[first.element_size()]),
                first.stride(0), size, ELEMENTS=_ELEMENTS, num_warps=4,
            )  # fmt: skip
        if window_table is not None:
            first = windows[0]
            dim = first.shape[1]
            _move_inputs[(triton.cdiv(dim, _CHANNELS), requests, len(windows))](
                *arguments, window_table, first.view(_DTYPE_OF_SIZE[first.element_size()]),
                *first.stride(), dim, most,
                WIDTH=self._width, CHANNELS=_CHANNELS, num_warps=4,
            )  # fmt: skip


def _arguments(trees: StateRows) -> tuple[Any, ...]:
    """The kernels' arguments for `trees`."""
    starts, parents, columns, accepted = trees
    return starts, parents, *_strided(columns), accepted


def _strided(columns: Tensor) -> tuple[Any, ...]:
    return columns, columns.stride(0), columns.stride(1)


def _mamba2_launch(dstate: int, device: torch.device) -> tuple[int, int]:
    """Dimensions and warps of a program: vLLM's, for devices without a tuned configuration."""
    for most, launch in ((16, (32, 4)), (32, (16, 4)), (64, (8, 4))):
        if dstate <= most:
            return launch
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10:
        return 32, 8
    return (4, 4) if dstate <= 128 else (4, 8)


@triton.jit
def _root_slot(columns, row_stride, step, accepted, request):
    """The slot that the root reads, or 0 for padding."""
    last = tl.maximum(tl.load(accepted + request) - 1, 0)
    own = columns + request * row_stride
    source = tl.load(own + last * step)
    return tl.where(tl.load(own) > 0, source, 0).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=_BY_STEP)
def _convolve(
    starts, parents, columns, row_stride, step, accepted,
    x, x_row, window, slot_stride, channel_stride, entry_stride,
    weight, weight_channel, weight_tap, bias, out, dim,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """One request, one block of channels."""
    request = tl.program_id(0)
    first = tl.load(starts + request).to(tl.int64)
    size = (tl.load(starts + request + 1) - first).to(tl.int32)
    if size <= 0:
        return
    slot = tl.load(columns + request * row_stride).to(tl.int64)
    if slot <= 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_dim = channel < dim
    entries = window + slot * slot_stride + channel * channel_stride
    offset = tl.maximum(tl.load(accepted + request) - 1, 0)
    history = entries + offset * entry_stride
    x += channel
    for place in range(size):
        total = tl.zeros([CHANNELS], tl.float32)
        if HAS_BIAS:
            total = tl.load(bias + channel, mask=in_dim, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            # The place of the row that gives this input; -1 is the last input before the root.
            here = place
            for _ in tl.static_range(WIDTH - 1 - tap):
                if here > 0:
                    here = tl.load(parents + first + here)
                else:
                    here -= 1
            is_row = tl.zeros([CHANNELS], tl.int32) + here >= 0
            row = tl.load(x + (first + here) * x_row, mask=in_dim & is_row, other=0.0)
            entry = history + (WIDTH - 1 + here) * entry_stride
            before = tl.load(entry, mask=in_dim & (is_row == 0), other=0.0)
            value = tl.where(is_row, row.to(window.dtype.element_ty), before)
            taps = tl.load(
                weight + channel * weight_channel + tap * weight_tap, mask=in_dim, other=0.0
            )
            product = value.to(tl.float32) * taps.to(tl.float32)
            if value.dtype == taps.dtype:  # vLLM rounds the product of two bfloat16
                product = product.to(value.dtype)
            total += product.to(tl.float32)
        if IS_SILU:
            total = total / (1 + tl.exp(-total))
        y = total.to(window.dtype.element_ty).to(out.dtype.element_ty)
        tl.store(out + (first + place) * dim + channel, y, mask=in_dim)
    tl.debug_barrier()  # the outputs are there, so the window may change
    for entry in tl.static_range(WIDTH - 2):
        kept = tl.load(history + (entry + 1) * entry_stride, mask=in_dim)
        tl.store(entries + entry * entry_stride, kept, mask=in_dim)
    tl.debug_barrier()
    for place in range(size):
        row = tl.load(x + (first + place) * x_row, mask=in_dim)
        target = entries + (WIDTH - 2 + place) * entry_stride
        tl.store(target, row.to(window.dtype.element_ty), mask=in_dim)


@triton.jit(do_not_specialize_on_alignment=_BY_STEP)
def _mamba2(
    starts, parents, columns, row_stride, step, accepted,
    state, slot_stride, x, x_row, x_head, x_dim, dt, dt_row, dt_head, a, a_head,
    b, b_row, b_group, b_n, c, c_row, c_group, c_n, skip, skip_head, dt_bias, bias_head,
    out, out_row, out_head, out_dim,
    heads, dim, dstate, heads_of_group,
    DIMS: tl.constexpr, DSTATE: tl.constexpr,
):  # fmt: skip
    """One block of dimensions, one request, one head."""
    request, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + request).to(tl.int64)
    size = (tl.load(starts + request + 1) - first).to(tl.int32)
    if size <= 0:
        return
    root = _root_slot(columns, row_stride, step, accepted, request)
    if root <= 0:
        return
    d = tl.program_id(0) * DIMS + tl.arange(0, DIMS)
    n = tl.arange(0, DSTATE)
    in_dim, in_state = d < dim, n < dstate
    inside = in_dim[:, None] & in_state[None, :]
    state += head * dim * dstate + d[:, None] * dstate + n[None, :]
    group = head // heads_of_group
    rate = tl.load(a + head * a_head).to(tl.float32)
    for place in range(size):
        row = first + place
        source = root
        if place > 0:
            parent = tl.load(parents + first + place)
            source = tl.load(columns + request * row_stride + parent * step).to(tl.int64)
        value = tl.load(state + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
        delta = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
        delta += tl.load(dt_bias + head * bias_head).to(tl.float32)
        delta = tl.where(delta <= 20.0, tl.math.log(tl.math.exp(delta) + 1), delta)
        decay = tl.math.exp2(1.4426950408889634 * (rate * delta))
        inputs = tl.load(
            x + row * x_row + head * x_head + d * x_dim, mask=in_dim, other=0.0
        ).to(tl.float32)  # fmt: skip
        write = tl.load(b + row * b_row + group * b_group + n * b_n, mask=in_state, other=0.0)
        read = tl.load(c + row * c_row + group * c_group + n * c_n, mask=in_state, other=0.0)
        value = value * decay + (write.to(tl.float32) * delta) * inputs[:, None]
        target = tl.load(columns + request * row_stride + place * step).to(tl.int64)
        if target > 0:
            tl.store(
                state + target * slot_stride, value.to(state.dtype.element_ty), mask=inside
            )  # fmt: skip
        y = tl.sum(value * read.to(tl.float32)[None, :], axis=1)
        y += inputs * tl.load(skip + head * skip_head).to(tl.float32)
        y = y.to(out.dtype.element_ty)
        tl.store(out + row * out_row + head * out_head + d * out_dim, y, mask=in_dim)
        tl.debug_barrier()  # the children of this row read what was stored


@triton.jit(do_not_specialize_on_alignment=_BY_STEP)
def _gated_delta(
    starts, parents, columns, row_stride, step, accepted,
    state, slot_stride, q, q_row, q_head, k, k_row, k_head, v, v_row, v_head,
    a, a_row, a_head, b, b_row, b_head, A_log, dt_bias, out, out_row, out_head,
    scale, heads_of_key, key_size, value_size,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One block of value dimensions, one request, one head."""
    request, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + request).to(tl.int64)
    size = (tl.load(starts + request + 1) - first).to(tl.int32)
    if size <= 0:
        return
    root = _root_slot(columns, row_stride, step, accepted, request)
    if root <= 0:
        return
    i = tl.arange(0, KEYS)
    j = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    in_keys, in_values = i < key_size, j < value_size
    inside = in_values[:, None] & in_keys[None, :]
    state += head * value_size * key_size + j[:, None] * key_size + i[None, :]
    key_head = head // heads_of_key
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    for place in range(size):
        row = first + place
        source = root
        if place > 0:
            parent = tl.load(parents + first + place)
            source = tl.load(columns + request * row_stride + parent * step).to(tl.int64)
        value = tl.load(state + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(q + row * q_row + key_head * q_head + i, mask=in_keys, other=0.0)
        query = query.to(tl.float32)
        key = tl.load(k + row * k_row + key_head * k_head + i, mask=in_keys, other=0.0)
        key = key.to(tl.float32)
        change = tl.load(v + row * v_row + head * v_head + j, mask=in_values, other=0.0)
        change = change.to(tl.float32)
        query = query / tl.sqrt(tl.sum(query * query) + 1e-6)
        key = key / tl.sqrt(tl.sum(key * key) + 1e-6)
        query = query * scale
        gate = tl.load(a + row * a_row + head * a_head).to(tl.float32)
        gate += tl.load(dt_bias + head).to(tl.float32)
        gate = -rate * tl.where(gate <= 20.0, tl.log(1.0 + tl.exp(gate)), gate)
        beta = tl.sigmoid(tl.load(b + row * b_row + head * b_head).to(tl.float32))

        value *= tl.exp(gate)
        change -= tl.sum(value * key[None, :], 1)
        change *= beta
        value += change[:, None] * key[None, :]
        y = tl.sum(value * query[None, :], 1).to(out.dtype.element_ty)
        tl.store(out + row * out_row + head * out_head + j, y, mask=in_values)
        target = tl.load(columns + request * row_stride + place * step).to(tl.int64)
        if target > 0:
            tl.store(
                state + target * slot_stride, value.to(state.dtype.element_ty), mask=inside
            )  # fmt: skip
        tl.debug_barrier()  # the children of this row read what was stored


@triton.jit(
    do_not_specialize=["path_row"],
    do_not_specialize_on_alignment=["columns", "paths", "lengths", "stops"],
)
def _move_states(
    columns, row_stride, step, paths, path_row, path_step, lengths, stops,
    table, typed, slot_stride, size, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Some elements of the two states that stay of a path, one request, one layer."""
    request, layer = tl.program_id(1), tl.program_id(2)
    last = tl.load(lengths + request).to(tl.int32) - 1
    if last <= 0:
        return
    own = columns + request * row_stride
    state = tl.load(table + layer).to(tl.pointer_type(typed.dtype.element_ty))
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    stop = tl.load(stops + request).to(tl.int32) - 1
    # The first one's target is before the sources of the second one.
    for turn in tl.static_range(2):
        depth = tl.where(stop < last, stop, 0) if turn == 0 else last
        place = tl.load(paths + request * path_row + depth * path_step).to(tl.int32)
        source = tl.load(own + place * step).to(tl.int64)
        target = tl.load(own + depth * step).to(tl.int64)
        moves = (place != depth) & (source > 0) & (target > 0)
        inside = (element < size) & moves
        values = tl.load(state + source * slot_stride + element, mask=inside)
        tl.store(state + target * slot_stride + element, values, mask=inside)


@triton.jit(
    do_not_specialize=["path_row", "most"],
    do_not_specialize_on_alignment=["columns", "paths", "lengths"],
)
def _move_inputs(
    columns, row_stride, step, paths, path_row, path_step, lengths,
    table, typed, slot_stride, channel_stride, entry_stride, dim, most,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of a window, one request, one layer."""
    request, layer = tl.program_id(1), tl.program_id(2)
    slot = tl.load(columns + request * row_stride).to(tl.int64)
    if slot <= 0:
        return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    in_dim = channel < dim
    window = tl.load(table + layer).to(tl.pointer_type(typed.dtype.element_ty))
    window += slot * slot_stride + channel * channel_stride
    length = tl.minimum(tl.load(lengths + request).to(tl.int32), most)
    for depth in range(1, length):
        place = tl.load(paths + request * path_row + depth * path_step).to(tl.int32)
        if place != depth:
            values = tl.load(window + (WIDTH - 2 + place) * entry_stride, mask=in_dim)
            tl.debug_barrier()  # the next input may go where this one was
            tl.store(window + (WIDTH - 2 + depth) * entry_stride, values, mask=in_dim)
