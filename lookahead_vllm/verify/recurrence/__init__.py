"""Recurrent layers at the nodes of draft trees: Mamba 2, gated delta nets, causal convolutions.

A recurrent layer has a state instead of keys and values. A node starts from its parent's state, so
each node of a step has a state of its own. Under speculation, vLLM gives a request 1 + K state
slots, its columns, and reads column `accepted - 1` in the next step. These functions do the same:
the root reads the column that vLLM reads, row j writes column j, and `StateMover.commit` moves the
accepted leaf's state to where the next step reads it. The convolution uses only one slot, column 0,
with a window of inputs that is longer than its kernel.

States are rounded to the cache's dtype at every node, and read back, as in plain decode. A chain
gives the states that plain decode gives, and a tree those of its paths. The formulas and the order
of sums are those of vLLM's kernels for one token; the tests compare bits. Arguments have the shapes
that vLLM's layers pass to their own kernels. On a GPU nothing waits for the device, and all
launches depend only on shapes, so a CUDA graph may contain them. On a CPU, a ValueError tells which
rule of `StateRows` is broken.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lookahead_vllm.verify.devices import module_for


class Filter(NamedTuple):
    """The kernel of a causal convolution."""

    weight: Tensor
    """[dim, width], not packed for a kernel of vLLM's; `width` is 2 to 8."""
    bias: Tensor | None
    """[dim]"""
    is_silu: bool
    """Whether SiLU follows."""


class StateRows(NamedTuple):
    """The rows of r requests, on the device of the layer's states.

    The rows of a request are its root and its nodes in list order: parents come before children.
    """

    starts: Tensor
    """int32 [r + 1]: the first row of each request, then the number of rows. vLLM's
    `query_start_loc`. A request may have no rows."""
    parents: Tensor
    """int32 [n]: the place of each row's parent among the rows of its request, below the row's own
    place. The root has place 0; its entry is not read."""
    columns: Tensor
    """int32 [at least r, k]: the state slots of each request, k at least the rows of any request.
    vLLM's state indices, with any strides. A request whose slot is 0, vLLM's null block, or
    negative is padding."""
    accepted: Tensor
    """int32 [at least r]: the tokens that each request's last step emitted, vLLM's
    `num_accepted_tokens`: the root reads column `accepted - 1`. 0 counts as 1."""


def convolution(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    trees: StateRows,
) -> Tensor:
    """A causal depthwise convolution along the path to each row.

    Row n gives `activation(bias + sum_j weight[:, j] * input_j)` over the last `width` inputs of
    its path; those before the root come from the window. Then the inputs of all rows are written to
    the window in list order, where vLLM's `causal_conv1d_update` writes those of a chain: the first
    `width - 2` entries are the inputs before the root, entry `width - 2 + j` is that of row j.

    Parameters
    ----------
    x : float32, bfloat16 or float16 [n, dim]
        The inputs; contiguous in the last dimension.
    window : [slots, dim, length]
        The layer's cache, `length` at least `width - 2` + the rows of any request. Any strides:
        vLLM's layouts are (slots, dim, length) and the transpose of (slots, length, dim). Request i
        reads `width - 1` entries from `accepted - 1` on, in slot `columns[i, 0]`.
    weight, bias
        As in `Filter`.
    activation : {"silu", "swish", None}
    trees : StateRows

    Returns
    -------
    [n, dim], like `x`
        0 in rows that belong to no request.
    """
    _check_trees(trees, len(x))
    dim, width = weight.shape
    assert x.shape[1:] == (dim,) and window.shape[1:2] == (dim,) and 2 <= width <= 8
    assert x.stride(1) == 1 and window.ndim == 3 and activation in ("silu", "swish", None)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    own = Filter(weight, bias, activation is not None)
    module_for("recurrence", x.device).convolution(x, window, own, trees, out)
    return out


class Mamba2(NamedTuple):
    """What Mamba 2's state update reads of n rows, as vLLM's `selective_state_update` gets it.

    dt, A, D and dt_bias are scalars of a head, expanded.
    """

    x: Tensor
    """[n, heads, dim]"""
    dt: Tensor
    """[n, heads, dim], expanded from [n, heads, 1]"""
    A: Tensor
    """[heads, dim, dstate], expanded from [heads, 1, 1]"""
    B: Tensor
    """[n, groups, dstate], and so C"""
    C: Tensor
    D: Tensor
    """[heads, dim], expanded from [heads, 1], and so dt_bias"""
    dt_bias: Tensor


def mamba2(state: Tensor, inputs: Mamba2, trees: StateRows, out: Tensor) -> None:
    """The selective state update at each row: S = e^(A d) S_parent + d x B^T, y = S C + D x.

    d is softplus(dt + dt_bias). Source: Mamba 2 (Dao and Gu, ICML 2024), section 3.

    Parameters
    ----------
    state : float32, bfloat16 or float16 [slots, heads, dim, dstate]
        The layer's cache, contiguous but for the first dimension; row j of request i writes slot
        `columns[i, j]`.
    out : [n, heads, dim]
        Written; rows that belong to no request are unchanged.
    """
    x, dt, A, B, C, D, dt_bias = inputs
    _check_trees(trees, len(x))
    _, heads, dim, dstate = state.shape
    _check_state(state)
    assert x.shape == (len(x), heads, dim) == out.shape
    assert B.shape == C.shape == (len(x), B.shape[1], dstate) and heads % B.shape[1] == 0
    of_heads = inputs._replace(  # what a device's module gets
        dt=_by_head(dt, x.shape, "dt"),
        A=_by_head(A, state.shape[1:], "A"),
        D=_by_head(D, (heads, dim), "D"),
        dt_bias=_by_head(dt_bias, (heads, dim), "dt_bias"),
    )
    module_for("recurrence", x.device).mamba2(state, of_heads, trees, out)


class GatedDelta(NamedTuple):
    """What a gated delta net reads of n rows; the arguments of vLLM's
    `fused_sigmoid_gating_delta_rule_update`, which uses head h // m of q and k for head h of v,
    m = heads / key heads."""

    q: Tensor
    """[n, key heads, key size], and so k"""
    k: Tensor
    v: Tensor
    """[n, heads, value size]. These three are contiguous in the last dimension, so slices of one
    tensor need no copy."""
    a: Tensor
    """[n, heads], and so b"""
    b: Tensor
    A_log: Tensor
    """[heads], and so dt_bias"""
    dt_bias: Tensor


def gated_delta(state: Tensor, inputs: GatedDelta, trees: StateRows, out: Tensor) -> None:
    """The gated delta rule at each row: S = e^g S_parent, S += beta (v - S k) k^T, y = S q.

    g = -e^A_log softplus(a + dt_bias), beta = sigmoid(b), q and k are divided by their norms, and q
    by the root of the key size. Source: Gated Delta Networks (Yang, Kautz and Hatamizadeh, ICLR
    2025), section 3.

    Parameters
    ----------
    state : float32, bfloat16 or float16
        The layer's cache, contiguous but for the first dimension. On a GPU
        [slots, heads, value size, key size]; on a CPU [slots, heads, key size, value size], the
        view that vLLM's CPU layer passes to its kernels. Row j of request i writes slot
        `columns[i, j]`.
    out : [n, heads, value size]
        Written; rows that belong to no request are unchanged.
    """
    q, k, v, a, b, _, _ = inputs
    _check_trees(trees, len(q))
    _check_state(state)
    num_rows, key_heads, key_size = q.shape
    heads, value_size = v.shape[1:]
    kernels = module_for("recurrence", state.device)
    sizes = (key_size, value_size) if kernels.KEYS_FIRST else (value_size, key_size)
    assert q.shape == k.shape and state.shape[1:] == (heads, *sizes) and heads % key_heads == 0
    assert v.shape == out.shape == (num_rows, heads, value_size)
    assert a.shape == b.shape == (num_rows, heads)
    assert all(t.stride(-1) == 1 for t in (q, k, v, out))
    kernels.gated_delta(state, inputs, trees, out)


class StateMover:
    """Commits the accepted paths of a step in all layers that share state slots.

    Parameters
    ----------
    states : sequence of [slots, ...]
        The recurrent states of the layers, each contiguous but for the first dimension; none for
        layers that are only convolutions.
    windows : sequence of [slots, dim, length]
        The windows of the layers' convolutions, as in `convolution`. The caches must not be
        reallocated.
    width : int
        The width of the convolutions' kernel.
    """

    def __init__(self, states: Sequence[Tensor], windows: Sequence[Tensor], width: int) -> None:
        for layers in (states, windows):
            assert len({(t.shape, t.stride(), t.dtype, t.device) for t in layers}) <= 1
        for state in states:
            _check_state(state)
        devices = {t.device for t in (*states, *windows)}
        module = module_for("recurrence", devices.pop())
        self._move = module.Mover(list(states), list(windows), width)

    def commit(self, columns: Tensor, paths: Tensor, lengths: Tensor, stops: Tensor) -> None:
        """Move each accepted path to where the next step reads it, with `accepted = lengths`.

        The state of the path's last row goes to column `lengths - 1`, and that of its row number
        `stops` to column `stops - 1`. The input of the row at depth d goes to entry `width - 2 + d`
        of the window. Nothing waits for a GPU.

        Parameters
        ----------
        columns : int32 [at least r, k]
            As in `StateRows`.
        paths : int32 or int64 [r, w]
            In column d, the place of the accepted row at depth d among its request's rows; the
            root's is 0. Entries after the path are not read.
        lengths : int32 or int64 [r]
            1 + accepted nodes, at most w; 0 and 1 move nothing.
        stops : int32 or int64 [r]
            The rows of a path up to the one whose state has to stay, too, from 1 on; those behind
            its end move nothing.
        """
        assert lengths.shape == stops.shape == paths.shape[:1] and len(columns) >= len(paths)
        if len(paths):
            self._move(columns, paths, lengths, stops)


def _check_trees(trees: StateRows, num_rows: int) -> None:
    requests = len(trees.starts) - 1
    assert {part.dtype for part in trees} == {torch.int32}
    assert trees.columns.ndim == 2 and min(len(trees.columns), len(trees.accepted)) >= requests
    assert len(trees.parents) >= num_rows


def _check_state(state: Tensor) -> None:
    assert not len(state) or state[0].is_contiguous(), state.stride()


def _by_head(values: Tensor, shape: Sequence[int], name: str) -> Tensor:
    """Undo the expansion of the last dimensions: [heads] or [n, heads]."""
    kept = 2 if name == "dt" else 1
    expanded = zip(values.stride()[kept:], shape[kept:], strict=True)
    is_scalar = all(not stride or size == 1 for stride, size in expanded)
    assert values.shape == tuple(shape) and is_scalar, f"{name} differs within a head"
    return values[(..., *[0] * (values.ndim - kept))]
