"""Recurrent layers at the nodes of trees, and causal convolutions along their paths, on a CPU.

The compiled kernels (`cpu.cpp`) take DTYPES.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lookahead_vllm.verify import native
from lookahead_vllm.verify.native import f32, fields, i32, i64, pointer
from lookahead_vllm.verify.recurrence import Filter, GatedDelta, Mamba2, StateRows

KEYS_FIRST = True
"""The layout of gated_delta's states."""
DTYPES = {torch.float32, torch.bfloat16}
_RULES = (
    "starts ascend from 0 to at most the number of rows",
    "a request has at most as many rows and accepted tokens as columns, or as its window has room",
    "a parent comes before its row",
    "the columns of rows are state slots",
)


class Forest(ctypes.Structure):
    """`Forest` of `cpu.cpp`: StateRows; strides in elements."""

    _fields_ = [
        *fields(i64, "requests", "rows", "slots"),
        *fields(pointer, "starts", "parents", "columns"),
        *fields(i64, "num_columns", "column_row", "column_step"),
        ("accepted", pointer),
    ]


class Mamba2Call(ctypes.Structure):
    """`Mamba2Call` of `cpu.cpp`; strides in elements."""

    _fields_ = [
        ("state", pointer),
        ("slot", i64),
        *fields(pointer, "x", "B", "C"),
        *fields(i64, "x_row", "bc_row"),
        *fields(pointer, "dt", "A", "D", "dt_bias"),
        ("out", pointer),
        ("out_row", i64),
        *fields(i32, "heads", "groups", "dim", "dstate"),
        ("threads", i32),
    ]


class DeltaCall(ctypes.Structure):
    """`DeltaCall` of `cpu.cpp`; strides in elements."""

    _fields_ = [
        ("state", pointer),
        ("slot", i64),
        *fields(pointer, "q", "k", "v"),
        *fields(i64, "q_row", "q_head", "k_row", "k_head", "v_row", "v_head"),
        *fields(pointer, "a", "b", "A_log", "dt_bias"),
        ("out", pointer),
        ("out_row", i64),
        ("out_head", i64),
        *fields(i32, "key_heads", "heads", "key_size", "value_size"),
        ("scale", f32),
        ("threads", i32),
    ]


class ConvolutionCall(ctypes.Structure):
    """`ConvolutionCall` of `cpu.cpp`; strides in elements."""

    _fields_ = [
        ("window", pointer),
        *fields(i64, "slot", "channel", "entry"),
        ("x", pointer),
        ("x_row", i64),
        *fields(pointer, "weight", "bias", "out"),
        *fields(i32, "dim", "width", "silu", "threads"),
    ]


def mamba2(state: Tensor, inputs: Mamba2, trees: StateRows, out: Tensor) -> None:
    x, dt, A, B, C, D, dt_bias = inputs
    library = _library(state, x, B, C, out)
    heads, dim, dstate = state.shape[1:]
    x, B, C = map(_with_strided_rows, (x, B, C))
    if B.stride(0) != C.stride(0):
        B, C = B.contiguous(), C.contiguous()
    dt, A, D, dt_bias = map(_floats, (dt, A, D, dt_bias))
    assert out.stride()[1:] == (dim, 1), out.stride()
    call = Mamba2Call(
        state.data_ptr(), state.stride(0),
        *map(_address, (x, B, C)), x.stride(0), B.stride(0),
        *map(_address, (dt, A, D, dt_bias)), out.data_ptr(), out.stride(0),
        heads, B.shape[1], dim, dstate, torch.get_num_threads(),
    )  # fmt: skip
    _run(library.lookahead_mamba2, call, trees, state, x)


def gated_delta(state: Tensor, inputs: GatedDelta, trees: StateRows, out: Tensor) -> None:
    q, k, v, a, b, A_log, dt_bias = inputs
    library = _library(state, q, k, v, out)
    key_heads, key_size = q.shape[1:]
    heads, value_size = v.shape[1:]
    a, b = (gate.to(q.dtype).contiguous() for gate in (a, b))
    A_log, dt_bias = _floats(A_log), _floats(dt_bias)
    call = DeltaCall(
        state.data_ptr(), state.stride(0), *map(_address, (q, k, v)),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *map(_address, (a, b, A_log, dt_bias)), out.data_ptr(), *out.stride()[:2],
        key_heads, heads, key_size, value_size, key_size**-0.5, torch.get_num_threads(),
    )  # fmt: skip
    _run(library.lookahead_gated_delta, call, trees, state, q)


def convolution(x: Tensor, window: Tensor, own: Filter, trees: StateRows, out: Tensor) -> None:
    library = _library(window, x)
    taps = Filter(_floats(own.weight.T.to(x.dtype)), _floats(own.bias), own.is_silu)
    _convolve(library, x, window, len(taps.weight), taps, trees, out)


def path_windows(x: Tensor, window: Tensor, width: int, trees: StateRows) -> Tensor:
    """The inputs that a causal convolution reads before each row; also updates the window.

    Passed as conv states, they let a kernel for one token compute all rows at once, each as a
    request of its own, so the rows are rounded as that kernel rounds. The arguments are those of
    `recurrence.convolution`, on the CPU; the window is updated in the same way.

    Returns
    -------
    [n, dim, width - 1], like `window`
        The last inputs of each row's path, without its own; 0 in rows that belong to no request.
        It is contiguous as [n, width - 1, dim].
    """
    if not 2 <= width <= 8:
        raise ValueError(f"width is {width}; it may be 2 to 8")
    library = _library(window, x)
    out = torch.zeros(len(x), width - 1, x.shape[1], dtype=window.dtype)
    _convolve(library, x, window, width, None, trees, out)
    return out.transpose(1, 2)


class Mover:
    def __init__(self, states: list[Tensor], windows: list[Tensor], width: int) -> None:
        self._states, self._windows, self._width = states, windows, width

    def __call__(self, columns: Tensor, paths: Tensor, lengths: Tensor, stops: Tensor) -> None:
        depths = torch.arange(paths.shape[1])
        moves = (depths > 0) & (depths < lengths[:, None]) & (paths != depths)
        moves &= columns[: len(paths), :1] > 0
        requests, to = moves.nonzero(as_tuple=True)
        if not len(requests):
            return
        slots, sources = columns[requests, 0].long(), paths[requests, to].long()
        for window in self._windows:
            before = self._width - 2
            window[slots, :, before + to] = window[slots, :, before + sources]
        is_read = (to == lengths[requests] - 1) | (to == stops[requests] - 1)
        requests, to, sources = requests[is_read], to[is_read], sources[is_read]
        pairs = torch.stack((columns[requests, sources], columns[requests, to]), dim=1).tolist()
        for state in self._states:
            for source, target in pairs:
                state[target] = state[source]


def _library(cache: Tensor, *rows: Tensor) -> ctypes.CDLL:
    """The compiled kernels, for a cache and rows that all have one dtype."""
    assert {cache.dtype, *(t.dtype for t in rows)} <= DTYPES, (cache.dtype, rows[0].dtype)
    assert len({t.dtype for t in rows}) == 1, [t.dtype for t in rows]
    return native.load()


def _convolve(
    library: ctypes.CDLL, x: Tensor, window: Tensor, width: int, taps: Filter | None,
    trees: StateRows, out: Tensor,
) -> None:  # fmt: skip
    """With `taps` of [width, dim]; without, `out` gets the inputs."""
    weight, bias, is_silu = taps or (None, None, False)
    call = ConvolutionCall(
        window.data_ptr(), *window.stride(), x.data_ptr(), x.stride(0),
        *map(_address, (weight, bias, out)), x.shape[1], width, is_silu, torch.get_num_threads(),
    )  # fmt: skip
    _run(library.lookahead_convolution, call, trees, window, x, window.shape[2] - width + 2)


def _run(
    function: Callable[..., int],
    call: ctypes.Structure,
    trees: StateRows,
    state: Tensor,
    rows: Tensor,
    most_rows: int | None = None,
) -> None:
    starts, parents, columns, accepted = trees
    starts, parents, accepted = (part.contiguous() for part in (starts, parents, accepted))
    most = columns.shape[1]
    forest = Forest(
        len(starts) - 1, len(rows), len(state), starts.data_ptr(), parents.data_ptr(),
        columns.data_ptr(), most if most_rows is None else min(most, most_rows), *columns.stride(),
        accepted.data_ptr(),
    )  # fmt: skip
    is_bf16 = (tensor.dtype == torch.bfloat16 for tensor in (state, rows))
    broken = function(ctypes.byref(forest), ctypes.byref(call), *is_bf16)
    if broken:
        raise ValueError(f"{_RULES[broken - 1]}; got {trees}")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _floats(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.float().contiguous()


def _with_strided_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose rows are contiguous."""
    if tensor.stride()[1:] == (tensor.shape[2], 1):
        return tensor
    return tensor.contiguous()
