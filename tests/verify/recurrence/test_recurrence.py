"""Recurrent layers at the nodes of trees equal the recurrence along each path."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lookahead_vllm.verify.recurrence import cpu
from tests.support.recurrence_cases import (
    LAYERS,
    Convolution,
    GatedDelta,
    Layer,
    Mamba2,
    Step,
    decode,
    random_step,
    rows_of,
    with_paths,
)

F32, BF16 = torch.float32, torch.bfloat16
HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
ROUNDS_TO_NEAREST = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
"""Without these instructions, vLLM's recurrences round to bfloat16 in a way of their own."""
SIZES = [6, 0, 1, 4]


def check_bits(actual: Tensor, expected: Tensor) -> None:
    """Without AVX-512, vLLM's kernels round in another order."""
    if HAS_AVX512:
        assert torch.equal(actual, expected)
    else:
        rounding = 1e-5 if actual.dtype == F32 else 2**-7
        torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)


def check(layer: Layer, step: Step) -> None:
    """Compare one step with the recurrence in float64, rounded where the cache rounds."""
    before, cache = layer.cache.clone(), layer.cache.clone()
    inputs = layer.draw(step.num_rows + 1)
    out = layer.run(cache, inputs, step.trees())
    untouched = torch.ones(len(cache), dtype=torch.bool)
    first = 0
    exact = layer.cache.dtype == F32 == out.dtype
    near = dict(rtol=1e-4, atol=2e-5) if exact else dict(rtol=0.05, atol=0.1)
    for request, tree in enumerate(step.parents):
        columns = step.columns[request].tolist()
        root = layer.before_root(before, columns, int(step.accepted[request]))
        memories: list[Tensor] = []
        for place, parent in enumerate(tree):
            row = first + place
            memory = memories[parent] if place else root
            y, memory = layer.token(memory, rows_of(inputs, row))
            memories.append(memory.to(cache.dtype).double())
            torch.testing.assert_close(out[row].double(), y, **near)
            if not isinstance(layer, Convolution):
                after = cache[columns[place]].double()
                torch.testing.assert_close(after, memories[place], **near)
                untouched[columns[place]] = False
        if tree and isinstance(layer, Convolution):
            rows = torch.stack([inputs[0][first + place] for place in range(len(tree))], dim=1)
            window = torch.cat((root[:, 1:], rows.to(cache.dtype).double()), dim=1)
            torch.testing.assert_close(
                cache[columns[0], :, : window.shape[1]].double(), window, **near
            )
            rest = slice(window.shape[1], None)
            assert torch.equal(cache[columns[0], :, rest], before[columns[0], :, rest])
            untouched[columns[0]] = False
        first += len(tree)
    assert torch.equal(cache[untouched], before[untouched])
    expected = 0.0 if isinstance(layer, Convolution) else 7.0  # padding
    assert (out[first:] == expected).all()


@pytest.mark.interpreted("too")
@pytest.mark.parametrize(("seed", "chains"), [(0, False), (1, False), (2, False), (0, True)])
@pytest.mark.parametrize("kind", LAYERS)
def test_each_row_continues_its_parent(kind, seed, chains):
    step = random_step(seed, SIZES, chains=chains, paddings=seed % 3)
    check(LAYERS[kind](seed), step)


@pytest.mark.interpreted("too")
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, BF16), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize("kind", LAYERS)
def test_other_dtypes(kind, dtype, cache_dtype):
    check(LAYERS[kind](5, dtype, cache_dtype), random_step(5, [7, 0, 5]))


def commit(
    layer: Layer, cache: Tensor, step: Step, paths: list[list[int]], table: Tensor, lengths: Tensor
) -> None:
    """Also check that one more state of each path stays, where a block ends."""
    stops = torch.tensor([1 + 5 * len(path) % 7 for path in paths], dtype=torch.int32)
    before = cache.clone()
    layer.mover(cache).commit(step.columns, table, lengths, stops)
    for columns, path, stop in zip(step.columns.tolist(), paths, stops.tolist(), strict=False):
        if stop <= len(path) and not isinstance(layer, Convolution):
            assert torch.equal(cache[columns[stop - 1]], before[columns[path[stop - 1]]])


@pytest.mark.interpreted("too")
@pytest.mark.parametrize(("dtype", "commits"), [(F32, True), (F32, False), (BF16, True)])
@pytest.mark.parametrize("kind", LAYERS)
def test_steps_of_trees_equal_plain_decode(kind, dtype, commits):
    """Bit by bit, through the commits; rounding in the cache is that of plain decode."""
    layer = LAYERS[kind](4, dtype, dtype)
    cache, plain = layer.cache.clone(), layer.cache.clone()
    step = random_step(4, [5, 1, 0], branches=True)
    first = step
    texts: list[list[tuple[Tensor, ...]]] = [[] for _ in step.parents]
    outputs: list[list[Tensor]] = [[] for _ in step.parents]
    for turn in range(3):
        inputs = layer.draw(step.num_rows)
        out = layer.run(cache, inputs, step.trees())
        paths, table, lengths = with_paths(step, turn)
        starts = step.trees().starts.tolist()
        for request, path in enumerate(paths):
            rows = [starts[request] + place for place in path]
            texts[request].append(rows_of(inputs, rows))
            outputs[request].append(out[rows])
        if commits:
            commit(layer, cache, step, paths, table, lengths)
        accepted = step.accepted.clone()
        accepted[: len(paths)] = torch.where(lengths > 0, lengths, accepted[: len(paths)])
        nodes = random_step(turn + 10, [3, 4, 5], branches=True)
        step = Step(nodes.parents, step.columns, accepted, step.paddings)
    equal = []
    for request, parts in enumerate(texts):
        inputs = tuple(torch.cat(rows) for rows in zip(*parts, strict=True))
        expected = decode(layer, plain, inputs, first, request)
        equal.append(torch.equal(torch.cat(outputs[request]), expected))
    assert all(equal) == commits


def test_parents_that_no_tree_has_are_refused():
    step = random_step(0, [4])
    changes: list[tuple[str, dict[str, Tensor], str]] = [
        ("mamba2", {"parents": torch.tensor([0, 0, 3, 0, 0, 0], dtype=torch.int32)}, "parent"),
        ("gated_delta", {"columns": step.columns[:, :3]}, "as many rows"),
        ("mamba2", {"columns": step.columns + 100}, "state slots"),
        ("convolution", {"accepted": step.accepted + 20}, "room"),
        ("convolution", {"starts": torch.tensor([0, 40, 42], dtype=torch.int32)}, "ascend"),
    ]
    for kind, change, message in changes:
        layer = LAYERS[kind](0)
        cache = layer.cache.clone()
        with pytest.raises(ValueError, match=message):
            layer.run(cache, layer.draw(step.num_rows), step.trees()._replace(**change))
        assert torch.equal(cache, layer.cache)


@pytest.fixture(scope="module")
def ops() -> Any:
    """vLLM's kernels for one token."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops

    if not hasattr(torch.ops._C, "selective_state_update_cpu"):
        pytest.skip("vLLM's kernels for CPUs are missing")
    return _custom_ops


def levels(step: Step) -> Iterator[tuple[list[int], list[tuple[int, int, int]]]]:
    """The rows of each depth, with request, parent and place of each."""
    starts = step.trees().starts.tolist()
    depths = [
        (len(step.path(request, place)), starts[request] + place, (request, parent, place))
        for request, tree in enumerate(step.parents)
        for place, parent in enumerate(tree)
    ]
    for depth in sorted({depth for depth, _, _ in depths}):
        level = [entry for entry in depths if entry[0] == depth]
        yield [row for _, row, _ in level], [where for _, _, where in level]


def check_levels(
    layer: Any, step: Step, one_token: Any, check: Callable[[Tensor, Tensor], None]
) -> None:
    """Compare outputs and states with `one_token(states, inputs)`, which updates a batch of states,
    called for one depth after another."""
    inputs = layer.draw(step.num_rows)
    cache, outputs = layer.cache.clone(), {}
    roots = [
        cache[columns[max(int(accepted), 1) - 1]].clone()
        for columns, accepted in zip(step.columns.tolist(), step.accepted, strict=True)
        if columns[0] < 1000
    ]
    for rows, places in levels(step):
        states = torch.stack([
            cache[step.columns[request, parent]] if place else roots[request]
            for request, parent, place in places
        ])  # fmt: skip
        for row, y in zip(rows, one_token(states, rows_of(inputs, rows)), strict=True):
            outputs[row] = y
        for state, (request, _, place) in zip(states, places, strict=True):
            cache[step.columns[request, place]] = state
    after = layer.cache.clone()
    out = layer.run(after, inputs, step.trees())
    check(out, torch.stack([outputs[row] for row in sorted(outputs)]))
    check(after, cache)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize("seed", range(3))
def test_mamba2_has_the_bits_of_vllms_kernel(dtype, cache_dtype, seed, ops):
    if not ROUNDS_TO_NEAREST and dtype == cache_dtype == BF16:
        pytest.skip("vLLM's kernel is far from the recurrence in bfloat16 on this processor")
    unit = 4 if dtype == cache_dtype == F32 else 8  # vLLM loads 8 aligned values of bfloat16
    layer = Mamba2(seed, dtype, cache_dtype, sizes=(4, 2, 16, 64 + unit * seed))
    step = random_step(seed, [7, 0, 9], paddings=0)

    def one_token(states: Tensor, rows: Any) -> Tensor:
        x, dt, A, B, C, D, dt_bias = layer.arguments(rows)
        every = torch.arange(len(x), dtype=torch.int32)
        out = torch.empty_like(x).contiguous()
        ops.selective_state_update_cpu(
            states, x, dt, A, B, C, D, None, dt_bias, True, every, every, -1, out, None, None
        )
        return out

    check_levels(layer, step, one_token, check_bits)


@pytest.mark.parametrize("cache_dtype", [F32, BF16])
@pytest.mark.parametrize("seed", range(3))
def test_gated_delta_has_the_bits_of_vllms_kernel(cache_dtype, seed, ops):
    """It takes bfloat16 alone."""
    if not ROUNDS_TO_NEAREST:
        pytest.skip("vLLM's kernel is far from the recurrence in bfloat16 on this processor")
    sizes = [(2, 4, 64, 64), (1, 2, 128, 128), (2, 4, 96, 32)][seed]
    layer = GatedDelta(seed, BF16, cache_dtype, sizes=sizes)
    step = random_step(seed, [7, 0, 9], paddings=0)

    def one_token(states: Tensor, rows: Any) -> Tensor:
        q, k, v, a, b = (t.contiguous() for t in rows)
        return ops.fused_sigmoid_gating_delta_rule_update_cpu(
            layer.A_log, layer.dt_bias, q[None], k[None], v[None], a, b, states,
            torch.arange(len(q), dtype=torch.int32), torch.arange(len(q) + 1, dtype=torch.int32),
            True,
        ).view(v.shape)  # fmt: skip

    check_levels(layer, step, one_token, check_bits)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_convolutions_have_the_bits_of_vllms_kernel(dtype, seed, ops):
    layer = Convolution(seed, dtype, dtype)
    step = random_step(seed, [7, 0, 9], paddings=0)
    (x,) = layer.draw(step.num_rows)
    cache, gathered = layer.cache.clone(), layer.cache.clone()
    out = layer.run(cache, (x,), step.trees())
    windows = cpu.path_windows(x, gathered, layer.width, step.trees())
    assert torch.equal(gathered, cache)
    every = torch.arange(len(x), dtype=torch.int32)
    expected = ops.causal_conv1d_update_cpu_vec(
        x.contiguous(), windows, layer.weight, layer.bias, layer.activation, every, None, -1
    )
    assert torch.equal(out, expected)


def paths_of(layer: Convolution, step: Step) -> Iterator[tuple[Tensor, list[int]]]:
    """The inputs before each row's root, and the rows from there to it."""
    starts = step.trees().starts.tolist()
    for request, tree in enumerate(step.parents):
        columns = step.columns[request].tolist()
        root = layer.before_root(layer.cache, columns, int(step.accepted[request]))
        for place in range(len(tree)):
            yield root, [starts[request] + above for above in step.path(request, place)]


def test_windows_of_paths():
    layer = Convolution(0, F32, BF16)
    step = random_step(2, [7, 0, 9], branches=True)
    (x,) = layer.draw(step.num_rows)
    cache = layer.cache.clone()
    windows = cpu.path_windows(x, cache, layer.width, step.trees())
    for row, (root, path) in enumerate(paths_of(layer, step)):
        inputs = torch.stack([*root.T, *x[path[:-1]].to(BF16).double()], dim=1)
        assert torch.equal(windows[row].double(), inputs[:, 1 - layer.width :])
    assert not windows[sum(map(len, step.parents)) :].any()


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="needs AVX512-BF16")
def test_windows_of_paths_give_packed_kernels_all_rows_at_once(ops):
    """vLLM's convolution of gated delta nets in bfloat16 has sums that no other kernel has."""
    layer = Convolution(0, BF16, BF16, dim=64)
    step = random_step(3, [7, 0, 6], paddings=0)
    (x,) = layer.draw(step.num_rows)
    x = x.contiguous()

    def one_token(x: Tensor, windows: Tensor) -> Tensor:
        every = torch.arange(len(x), dtype=torch.int32)
        return ops.causal_conv1d_update_cpu(
            x, windows, layer.weight, layer.bias, True, every, is_weight_packed=False
        )

    windows = cpu.path_windows(x, layer.cache.clone(), layer.width, step.trees())
    out = one_token(x, windows)
    for row, (root, path) in enumerate(paths_of(layer, step)):
        window = root.to(BF16).T.contiguous().T[None]
        for above in path:
            y = one_token(x[above][None], window)
        assert torch.equal(out[row], y[0])
