"""Random trees over recurrent layers, and the recurrences in float64, one token after the other."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from lookahead_vllm.verify import recurrence
from lookahead_vllm.verify.devices import module_for
from lookahead_vllm.verify.recurrence import StateRows

SLOTS = 80

Inputs = tuple[Tensor, ...]
"""What a layer gets for each of n rows."""


@dataclass(frozen=True)
class Step:
    """Trees of some requests. `parents` has a list for each request; the root is its own parent."""

    parents: list[list[int]]
    columns: Tensor
    accepted: Tensor
    paddings: int = 0
    """Requests without a slot, which follow the others, with two rows each."""

    def trees(self) -> StateRows:
        sizes = [len(tree) for tree in self.parents] + [2] * self.paddings
        parents = [p for tree in self.parents for p in tree] + [0, 0] * self.paddings
        return StateRows(
            torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
            torch.tensor([*parents, 0], dtype=torch.int32),
            self.columns,
            self.accepted,
        )

    def path(self, request: int, place: int) -> list[int]:
        """The places from the root to a row."""
        path = [place]
        while path[0]:
            path.insert(0, self.parents[request][path[0]])
        return path

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.parents)) + 2 * self.paddings


def random_step(
    seed: int,
    sizes: list[int],
    columns: int = 9,
    paddings: int = 1,
    chains: bool = False,
    branches: bool = False,
) -> Step:
    """`branches`: the second node of each tree with more than one node is not the first's child."""
    rng = np.random.default_rng(seed)
    parents = [
        [0 if i == 0 else i - 1 if chains else int(rng.integers(0, i)) for i in range(size)]
        for size in sizes
    ]
    if branches:
        for tree in parents:
            tree[2:3] = [0] * len(tree[2:3])
    count = len(sizes) + paddings
    own = rng.permutation(np.arange(1, SLOTS))[: count * columns].reshape(count, columns)
    own[len(sizes) :] = 0
    table = np.full((count + 1, columns + 3), 10**6)  # ours is a part of vLLM's block table
    table[:count, :columns] = own
    accepted = rng.integers(0, columns + 1, count + 1)
    return Step(
        parents,
        torch.tensor(table, dtype=torch.int32)[:, :columns],
        torch.tensor(accepted, dtype=torch.int32),
        paddings,
    )


def with_paths(step: Step, seed: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """A random accepted path for each request: places, and the arguments of `StateMover.commit`."""
    rng = np.random.default_rng(seed)
    paths = [
        step.path(request, int(rng.integers(0, len(tree)))) if tree else []
        for request, tree in enumerate(step.parents)
    ]
    width = max([1, *map(len, paths)]) + 2
    table = np.full((len(paths), width), -1)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path
    lengths = [len(path) for path in paths]
    return paths, torch.tensor(table), torch.tensor(lengths, dtype=torch.int32)


class _States:
    """A layer whose states have a column for every row."""

    cache: Tensor

    def before_root(self, cache: Tensor, columns: list[int], accepted: int) -> Tensor:
        return cache[columns[max(accepted, 1) - 1]].double()

    def mover(self, cache: Tensor) -> recurrence.StateMover:
        return recurrence.StateMover([cache], [], 4)


def _cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Slots with other data between them, as in vLLM's pages."""
    return torch.randn(SLOTS, 2, *shape).to(dtype)[:, 1]


class Mamba2(_States):
    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int, int, int] = (4, 2, 6, 20),
    ) -> None:
        torch.manual_seed(seed)
        self.heads, self.groups, self.dim, self.dstate = sizes
        self.dtype = dtype
        self.A, self.D = -torch.rand(self.heads) - 0.1, torch.randn(self.heads)
        self.dt_bias = torch.randn(self.heads).to(dtype)
        self.cache = _cache((self.heads, self.dim, self.dstate), cache_dtype)

    def draw(self, rows: int) -> Inputs:
        """x, B and C are parts of one tensor, as after vLLM's convolution."""
        x_size, bc_size = self.heads * self.dim, self.groups * self.dstate
        x, B, C = torch.randn(rows, x_size + 2 * bc_size).to(self.dtype).split(
            [x_size, bc_size, bc_size], dim=1
        )  # fmt: skip
        dt = 2 * torch.randn(rows, self.heads).to(self.dtype)
        shape = (rows, self.groups, self.dstate)
        return x.view(rows, self.heads, self.dim), dt, B.view(shape), C.view(shape)

    def arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        """As vLLM's layer has them."""
        x, dt, B, C = inputs
        expanded = (self.heads, self.dim)
        return (
            x, dt[:, :, None].expand(-1, -1, self.dim),
            self.A[:, None, None].expand(*expanded, self.dstate), B, C,
            self.D[:, None].expand(expanded), self.dt_bias[:, None].expand(expanded),
        )  # fmt: skip

    def run(self, cache: Tensor, inputs: Inputs, trees: StateRows) -> Tensor:
        out = torch.full_like(inputs[0], 7.0).contiguous()
        recurrence.mamba2(cache, recurrence.Mamba2(*self.arguments(inputs)), trees, out)
        return out

    def token(self, memory: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (t.double() for t in inputs)
        dt = softplus(dt + self.dt_bias.double())
        B, C = (t.repeat_interleave(self.heads // self.groups, 0) for t in (B, C))
        decay = (self.A.double() * dt).exp()[:, None, None]
        memory = memory * decay + (x * dt[:, None])[..., None] * B[:, None]
        return (memory * C[:, None]).sum(-1) + x * self.D.double()[:, None], memory


class GatedDelta(_States):
    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int, int, int] = (1, 2, 40, 36),
    ) -> None:
        torch.manual_seed(seed)
        self.key_heads, self.heads, self.key_size, self.value_size = sizes
        self.dtype = dtype
        self.A_log, self.dt_bias = torch.randn(self.heads), torch.randn(self.heads).to(dtype)
        self.keys_first = module_for("recurrence", torch.device("cpu")).KEYS_FIRST
        shape = (self.key_size, self.value_size)[:: 1 if self.keys_first else -1]
        self.cache = _cache((self.heads, *shape), cache_dtype)

    def draw(self, rows: int) -> Inputs:
        """q, k and v are parts of one tensor, as after vLLM's convolution."""
        k_size, v_size = self.key_heads * self.key_size, self.heads * self.value_size
        q, k, v = torch.randn(rows, 2 * k_size + v_size).to(self.dtype).split(
            [k_size, k_size, v_size], dim=1
        )  # fmt: skip
        q, k = (t.view(rows, self.key_heads, self.key_size) for t in (q, k))
        a, b = torch.randn(2, rows, self.heads).to(self.dtype)
        return q, k, v.view(rows, self.heads, self.value_size), 2 * a, b

    def run(self, cache: Tensor, inputs: Inputs, trees: StateRows) -> Tensor:
        out = torch.full_like(inputs[2], 7.0).contiguous()
        all_inputs = recurrence.GatedDelta(*inputs, self.A_log, self.dt_bias)
        recurrence.gated_delta(cache, all_inputs, trees, out)
        return out

    def token(self, memory: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v, a, b = (t.double() for t in inputs)
        q, k = (t.repeat_interleave(self.heads // self.key_heads, 0) for t in (q, k))
        epsilon = 1e-5 if self.keys_first else 1e-6  # as vLLM has it
        q, k = (t / (t.square().sum(-1, keepdim=True) + epsilon).sqrt() for t in (q, k))
        g = -self.A_log.double().exp() * softplus(a + self.dt_bias.double())
        memory = memory if self.keys_first else memory.mT
        memory = memory * g.exp()[:, None, None]
        change = (v - (memory * k[..., None]).sum(1)) * b.sigmoid()[:, None]
        memory = memory + k[..., None] * change[:, None]
        y = (memory * q[..., None]).sum(1) * self.key_size**-0.5
        return y, memory if self.keys_first else memory.mT


class Convolution:
    """Its memory is the last width - 1 inputs, [dim, width - 1]."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype = torch.float32,
        dim: int = 300,
    ) -> None:
        torch.manual_seed(seed)
        self.width = (4, 3, 2)[seed % 3]
        self.dtype, self.activation = dtype, ("silu", None)[seed % 2]
        self.weight = torch.randn(dim, self.width).to(dtype)
        self.bias = torch.randn(dim).to(dtype) if seed % 4 < 2 else None
        is_dim_first = seed % 2
        shape = (dim, 14) if is_dim_first else (14, dim)
        self.cache = _cache(shape, cache_dtype)
        if not is_dim_first:
            self.cache = self.cache.transpose(1, 2)

    def draw(self, rows: int) -> Inputs:
        dim = len(self.weight)
        return (torch.randn(rows, dim + 5).to(self.dtype)[:, :dim],)

    def run(self, cache: Tensor, inputs: Inputs, trees: StateRows) -> Tensor:
        return recurrence.convolution(
            inputs[0], cache, self.weight, self.bias, self.activation, trees
        )

    def before_root(self, cache: Tensor, columns: list[int], accepted: int) -> Tensor:
        return cache[columns[0], :, max(accepted, 1) - 1 :][:, : self.width - 1].double()

    def token(self, memory: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        stored = torch.cat((memory, inputs[0].to(self.cache.dtype).double()[:, None]), dim=1)
        y = (stored * self.weight.double()).sum(-1)
        y = y if self.bias is None else y + self.bias.double()
        return silu(y) if self.activation else y, stored[:, 1:]

    def mover(self, cache: Tensor) -> recurrence.StateMover:
        return recurrence.StateMover([], [cache], self.width)


Layer = Mamba2 | GatedDelta | Convolution
LAYERS: dict[str, type[Layer]] = {
    "mamba2": Mamba2,
    "gated_delta": GatedDelta,
    "convolution": Convolution,
}


def rows_of(inputs: Inputs, rows: Any) -> Inputs:
    return tuple(t[rows] for t in inputs)


def decode(layer: Layer, cache: Tensor, inputs: Inputs, step: Step, request: int) -> Tensor:
    """Plain decode of one request with our kernel: its rows are tokens, one step each."""
    own = replace(
        step,
        parents=[[0]],
        columns=step.columns[request : request + 1],
        accepted=step.accepted[request : request + 1],
        paddings=0,
    )
    outputs = []
    for row in range(len(inputs[0])):
        outputs.append(layer.run(cache, rows_of(inputs, [row]), own.trees()))
        own = replace(own, accepted=torch.ones(1, dtype=torch.int32))
    return torch.cat(outputs)
