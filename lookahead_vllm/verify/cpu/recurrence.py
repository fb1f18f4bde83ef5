"""Recurrent layers at the nodes of trees, and causal convolutions along their paths, on a CPU.

The compiled kernels (`csrc/recurrence.cpp`) take float32 and bfloat16. Without a compiler, and for
float16, the same formulas run on plain torch, row by row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from lookahead_vllm.verify.cpu import native
from lookahead_vllm.verify.recurrence import StateRows

KEYS_FIRST = True
"""The layout of gated_delta's states."""
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_RULES = (
    "starts ascend from 0 to at most the number of rows",
    "a request has at most as many rows and accepted tokens as columns, or as its window has room",
    "a parent comes before its row",
    "the columns of rows are state slots",
)


def mamba2(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    trees: StateRows,
    out: Tensor,
    z: Tensor | None,
    dt_softplus: bool,
) -> None:
    """See `recurrence.mamba2`; dt is [n, heads], A, D and dt_bias are [heads].

    Raises
    ------
    ValueError
        `trees` breaks a rule of `StateRows`.
    """
    library = _library(state, x, B, C, out, *([] if z is None else [z]))
    if library is None or len({x.dtype, B.dtype, C.dtype, out.dtype}) > 1:
        _mamba2_torch(state, x, dt, A, B, C, D, dt_bias, trees, out, z, dt_softplus)
        return
    heads, dim, dstate = state.shape[1:]
    x, B, C, z = map(_with_strided_rows, (x, B, C, z))
    if B.stride(0) != C.stride(0):
        B, C = B.contiguous(), C.contiguous()
    dt, A, D, dt_bias = map(_floats, (dt, A, D, dt_bias))
    _need_strided_rows(out)
    call = native.Mamba2Call(
        state.data_ptr(), state.stride(0),
        *map(_address, (x, B, C, z)), x.stride(0), B.stride(0), 0 if z is None else z.stride(0),
        *map(_address, (dt, A, D, dt_bias)), out.data_ptr(), out.stride(0),
        heads, B.shape[1], dim, dstate, dt_softplus, torch.get_num_threads(),
    )  # fmt: skip
    _run(library.lookahead_mamba2, call, trees, state, x)


def gated_delta(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    trees: StateRows,
    out: Tensor,
    scale: float,
) -> None:
    """See `recurrence.gated_delta`.

    Raises
    ------
    ValueError
        `trees` breaks a rule of `StateRows`.
    """
    library = _library(state, q, k, v, out)
    if library is None or len({q.dtype, k.dtype, v.dtype, out.dtype}) > 1:
        _gated_delta_torch(state, q, k, v, a, b, A_log, dt_bias, trees, out, scale)
        return
    key_heads, key_size = q.shape[1:]
    heads, value_size = v.shape[1:]
    a, b = (gate.to(q.dtype).contiguous() for gate in (a, b))
    A_log, dt_bias = _floats(A_log), _floats(dt_bias)
    call = native.DeltaCall(
        state.data_ptr(), state.stride(0), *map(_address, (q, k, v)),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *map(_address, (a, b, A_log, dt_bias)), out.data_ptr(), *out.stride()[:2],
        key_heads, heads, key_size, value_size, scale, torch.get_num_threads(),
    )  # fmt: skip
    _run(library.lookahead_gated_delta, call, trees, state, q)


def convolution(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    is_silu: bool,
    trees: StateRows,
    out: Tensor,
) -> None:
    """See `recurrence.convolution`; `out` is contiguous and zero.

    Raises
    ------
    ValueError
        `trees` breaks a rule of `StateRows`.
    """
    library = _library(window, x)
    if library is None:
        inputs = _gather_windows_torch(x, window, weight.shape[1], trees)
        inputs = torch.cat((inputs.to(x.dtype), x.unsqueeze(-1)), dim=-1)
        y = torch.zeros(out.shape) if bias is None else bias.float().expand(out.shape)
        for tap in range(weight.shape[1]):
            y = y + inputs[:, :, tap].float() * weight[:, tap].float()
        for request in _requests(trees):
            # Row by row, because the rounding of torch's silu depends on the shape.
            for row in range(request.rows.start, request.rows.stop):
                out[row] = (silu(y[row]) if is_silu else y[row]).to(out.dtype)
        return
    weight, bias = _floats(weight.T.to(x.dtype)), _floats(bias)
    _convolve(library, x, window, weight, len(weight), bias, is_silu, trees, out)


def path_windows(x: Tensor, window: Tensor, width: int, trees: StateRows) -> Tensor:
    """The inputs that a causal convolution reads before each row; also updates the window.

    Passed as conv states, they let a kernel for one token compute all rows at once, each as a
    request of its own, so the rows are rounded as that kernel rounds.

    Parameters
    ----------
    x, window, trees
        As in `recurrence.convolution`, on the CPU; the window is updated in the same way.
    width : int
        Of the convolution's kernel, 2 to 8.

    Returns
    -------
    [n, dim, width - 1], like `window`
        The last inputs of each row's path, without its own; 0 in rows that belong to no request.
        It is contiguous as [n, width - 1, dim].

    Raises
    ------
    ValueError
        `trees` breaks a rule of `StateRows`, or `width` is out of range.
    """
    if not 2 <= width <= 8:
        raise ValueError(f"width is {width}; it may be 2 to 8")
    library = _library(window, x)
    if library is None:
        return _gather_windows_torch(x, window, width, trees)
    out = torch.zeros(len(x), width - 1, x.shape[1], dtype=window.dtype)
    _convolve(library, x, window, None, width, None, False, trees, out)
    return out.transpose(1, 2)


class Mover:
    """See `recurrence.StateMover`."""

    def __init__(self, states: list[Tensor], windows: list[Tensor], width: int) -> None:
        self._states, self._windows, self._width = states, windows, width

    def __call__(self, columns: Tensor, paths: Tensor, lengths: Tensor) -> None:
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
        is_last = to == lengths[requests] - 1
        requests, to, sources = requests[is_last], to[is_last], sources[is_last]
        pairs = torch.stack((columns[requests, sources], columns[requests, to]), dim=1).tolist()
        for state in self._states:
            for source, target in pairs:
                state[target] = state[source]


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels, if they support the dtypes of these tensors."""
    return native.load() if all(t.dtype in _NATIVE_DTYPES for t in tensors) else None


def _convolve(
    library: ctypes.CDLL,
    x: Tensor,
    window: Tensor,
    weight: Tensor | None,
    width: int,
    bias: Tensor | None,
    is_silu: bool,
    trees: StateRows,
    out: Tensor,
) -> None:
    call = native.ConvolutionCall(
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
    starts, accepted = starts.contiguous(), accepted.contiguous()
    parents = parents if parents is None else parents.contiguous()
    most = columns.shape[1]
    forest = native.Forest(
        len(starts) - 1, len(rows), len(state), starts.data_ptr(), _address(parents),
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


def _with_strided_rows(tensor: Tensor | None) -> Any:
    """The tensor, or a copy whose rows are contiguous."""
    if tensor is None or tensor.stride()[1:] == (tensor.shape[2], 1):
        return tensor
    return tensor.contiguous()


def _need_strided_rows(out: Tensor) -> None:
    if _with_strided_rows(out) is not out:
        raise ValueError(f"the rows of out are contiguous; its strides are {out.stride()}")


class _Request(NamedTuple):
    """A request that is not padding."""

    rows: slice
    parents: list[int]
    """The place of each row's parent; the root's is not read."""
    columns: Tensor
    root: int
    """The column that the root reads."""


def _requests(trees: StateRows) -> Iterator[_Request]:
    starts = trees.starts.tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        root = max(int(trees.accepted[request]), 1) - 1
        columns, rows = trees.columns[request], slice(first, end)
        if end > first and columns[[0, root]].min() > 0:
            parents = list(range(-1, end - first - 1))
            if trees.parents is not None:
                parents = trees.parents[rows].tolist()
            yield _Request(rows, parents, columns, root)


def _rows(trees: StateRows) -> Iterator[tuple[int, int, int]]:
    """Each row with the slot that it reads and the slot that it writes, parents first."""
    for request in _requests(trees):
        columns = request.columns.tolist()
        for place, parent in enumerate(request.parents):
            source = columns[parent if place else request.root]
            yield request.rows.start + place, source, columns[place]


def _mamba2_torch(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    trees: StateRows,
    out: Tensor,
    z: Tensor | None,
    dt_softplus: bool,
) -> None:
    B, C = (t.float().repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    for row, source, target in _rows(trees):
        inputs, step = x[row].float(), dt[row].float()
        step = step if dt_bias is None else step + dt_bias.float()
        step = softplus(step) if dt_softplus else step
        value = state[source].float() * (A.float() * step).exp()[:, None, None]
        value += inputs[:, :, None] * (B[row] * step[:, None])[:, None]
        state[target] = value.to(state.dtype)
        y = (value * C[row, :, None]).sum(-1)
        y = y if D is None else y + inputs * D.float()[:, None]
        out[row] = (y if z is None else y * silu(z[row].float())).to(out.dtype)


def _gated_delta_torch(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    trees: StateRows,
    out: Tensor,
    scale: float,
) -> None:
    group = v.shape[1] // q.shape[1]
    q, k = (t.float().repeat_interleave(group, 1) for t in (q, k))
    for row, source, target in _rows(trees):
        query, key = (
            t[row] * (t[row].square().sum(-1, keepdim=True) + 1e-5).rsqrt() for t in (q, k)
        )
        gate = -A_log.float().exp() * softplus(a[row].float() + dt_bias.float())
        value = state[source].float() * gate.exp()[:, None, None]  # [heads, key, value]
        known = (value * key[:, :, None]).sum(1)
        change = (v[row].float() - known) * b[row].float().sigmoid()[:, None]
        value += key[:, :, None] * change[:, None]
        state[target] = value.to(state.dtype)
        out[row] = ((value * query[:, :, None]).sum(1) * scale).to(out.dtype)


def _gather_windows_torch(x: Tensor, window: Tensor, width: int, trees: StateRows) -> Tensor:
    before = width - 1
    out = torch.zeros(len(x), before, x.shape[1], dtype=window.dtype).transpose(1, 2)
    for rows, parents, columns, root in _requests(trees):
        own = window[columns[0]]
        inputs = torch.cat((own[:, root : root + before], x[rows].to(own.dtype).T), dim=1)
        paths: list[list[int]] = []  # indices into `inputs`
        for place, parent in enumerate(parents):
            above = paths[parent][1:] if place else list(range(before))
            out[rows.start + place] = inputs[:, above]
            paths.append([*above, before + place])
        own[:, : inputs.shape[1] - 1] = inputs[:, 1:]
    return out
