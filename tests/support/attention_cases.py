"""Inputs of tree attention, random or given, and their attention in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.attention import PagedCall, paged_attention
from lookahead_vllm.verify.attention.cpu import TreeCall, supported, tree_attention
from lookahead_vllm.verify.layout.paged_batch import CAUSAL, PagedBatch, query_tokens
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from tests.support.packing import pack

ROUNDING = {torch.float32: 2**-18, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative tolerance of an element of the output of `tree_attention`."""
ROW_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Tolerance of a row of the output of `paged_attention`, relative to the row's norm."""

IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpreted)]
"""Of attention over a cache of GPUs."""

Attend = str | Callable[[PagedCall], None]
"""An `impl` of `paged_attention`, or a function that replaces it."""


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    """A tree of `nodes` nodes, whose shape varies from a chain to a star."""
    reach = int(rng.integers(1, nodes + 2))
    parents = [int(rng.integers(max(-1, i - reach), i)) for i in range(nodes)]
    return DraftTree.from_lists(range(nodes), parents)


@dataclass
class AttentionCase:
    """Trees with random K and V, in vLLM's cache for CPUs; all unused slots hold `poison`."""

    trees: list[DraftTree]
    contexts: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = -1
    alibi: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    poison: float = math.nan
    gap: int = 1
    """Query tokens of other requests before each tree."""
    fused: bool = False
    """The query is a view into a QKV tensor, the cache a view into a larger one."""
    packed: bool = False
    """vLLM's layout for AMX; ignored where it is not supported."""
    nan_node: bool = False
    """The last node of each tree has a NaN key and inf values."""
    seed: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        sizes = [len(tree) + 1 for tree in self.trees]
        starts = [self.gap * (i + 1) + sum(sizes[:i]) for i in range(len(sizes))]
        tokens = sum(sizes) + self.gap * (len(sizes) + 1)
        rows = torch.randperm(len(sizes) + 2)[: len(sizes)].tolist()
        self.batch = TreeBatch.build(self.trees, rows, starts, self.contexts)

        width = (self.heads + 2 * self.kv_heads) * self.head_size
        qkv = torch.randn(tokens, width).to(self.dtype)
        query = qkv[:, : self.heads * self.head_size]
        self.query = query.view(tokens, self.heads, self.head_size)
        output_shape = (tokens, self.heads * self.head_size)
        self.output = torch.full(output_shape, math.nan, dtype=self.dtype)
        if not self.fused:
            self.query = self.query.contiguous()
            self.output = self.output.view_as(self.query)

        max_blocks = max(c + n for c, n in zip(self.contexts, sizes, strict=True))
        max_blocks = max_blocks // self.block_size + 2
        blocks = (len(sizes) + 2) * max_blocks
        self.block_table = torch.randperm(blocks).int().view(-1, max_blocks)
        cache_shape = (blocks, 2, self.kv_heads, self.block_size, 2 * self.head_size)
        caches = torch.full(cache_shape, self.poison, dtype=self.dtype)
        self.kv_cache = caches[:, 0] if self.fused else caches[:, 0].contiguous()
        flat = self.kv_cache.flatten(2)
        cut = self.block_size * self.head_size
        k_cache = flat[..., :cut].unflatten(-1, (self.head_size, self.block_size))
        v_cache = flat[..., cut:].unflatten(-1, (self.block_size, self.head_size))
        for row, size, context in zip(rows, sizes, self.contexts, strict=True):
            n = context + size
            k = torch.randn(n, self.kv_heads, self.head_size).to(self.dtype)
            v = torch.randn(n, self.kv_heads, self.head_size).to(self.dtype)
            if self.nan_node and size > 1:
                k[-1], v[-1] = math.nan, math.inf
            slots = torch.arange(n)
            if self.window > 0:  # vLLM may have freed the slots before the root's window
                slots = slots[max(0, context - self.window + 1) :]
            blocks_of = self.block_table[row, slots // self.block_size].long()
            k_cache[blocks_of, :, :, slots % self.block_size] = k[slots]
            v_cache[blocks_of, :, slots % self.block_size] = v[slots]
            self.keys.append(k)
            self.values.append(v)
        shape = self.head_size, self.dtype, self.block_size
        self.packed = self.packed and supported(*shape, packed=True)
        if self.packed:
            pack(self.kv_cache)

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def alibi_slopes(self) -> torch.Tensor | None:
        return 2.0 ** -torch.arange(1, self.heads + 1).float() if self.alibi else None

    @property
    def sink_logits(self) -> torch.Tensor | None:
        return torch.linspace(-1, 2, self.heads).to(self.dtype) if self.sinks else None

    def run(self, batch: TreeBatch | None = None) -> torch.Tensor:
        """Call `tree_attention`; returns the output, [tokens, heads, head_size]."""
        call = TreeCall(
            self.query,
            self.kv_cache,
            self.output,
            self.block_table,
            self.batch if batch is None else batch,
            scale=self.scale,
            sliding_window=self.window,
            alibi_slopes=self.alibi_slopes,
            soft_cap=self.soft_cap,
            sinks=self.sink_logits,
            packed=self.packed,
        )
        tree_attention(call)
        return self.output.view(len(self.query), self.heads, self.head_size)

    def reference(self) -> torch.Tensor:
        """The expected output in float64, row by row and head by head; NaN outside of trees."""
        output = torch.full(self.query.shape, math.nan, dtype=torch.float64)
        group = self.heads // self.kv_heads
        alibi_slopes, sinks = self.alibi_slopes, self.sink_logits
        for tree, k, v, start, context in zip(
            self.trees, self.keys, self.values, self.batch.starts, self.contexts, strict=True
        ):
            depth = [0, *tree.depths.tolist()]
            parent = [-1, *(tree.parents + 1).tolist()]
            for row in range(len(tree) + 1):
                slots = list(range(context))
                positions = list(range(context))
                node = row
                while node >= 0:
                    slots.append(context + node)
                    positions.append(context + depth[node])
                    node = parent[node]
                distances = torch.tensor(positions) - (context + depth[row])
                attended = distances > -self.window if self.window > 0 else distances <= 0
                attended_slots = torch.tensor(slots)[attended]
                distances = distances[attended].double()
                for head in range(self.heads):
                    q = self.query[start + row, head].double()
                    scores = k[attended_slots, head // group].double() @ q * self.scale
                    if self.soft_cap:
                        scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                    if alibi_slopes is not None:
                        scores += alibi_slopes[head].double() * distances
                    if sinks is not None:
                        scores = torch.cat((scores, sinks[head, None].double()))
                    p = scores.softmax(0)[: len(attended_slots)]
                    output[start + row, head] = p @ v[attended_slots, head // group].double()
        return output

    def check(self, atol: float = 2e-5) -> None:
        """Compare the output with the reference; rows outside of trees must stay NaN."""
        expected, rtol = self.reference(), ROUNDING[self.dtype]
        result = self.run().double()
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)


@dataclass
class PagedAttentionCase(AttentionCase):
    """The same with vLLM's cache layouts on CUDA, and with requests that have no mask."""

    layout: str = "tokens first"
    causal: tuple[int, ...] = ()
    """Indices of the trees, all of them chains, that are passed without a mask."""
    fp8: bool = False
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks = self.block_table.numel()
        size, heads, width = self.block_size, self.kv_heads, self.head_size
        dtype = torch.float8_e4m3fn if self.fp8 else self.dtype
        shape = {
            "tokens first": (blocks, size, heads, 2 * width),
            "heads first": (blocks, heads, size, 2 * width),
            "halves": (blocks, 2, size, heads, width),
        }[self.layout]
        cache = torch.full(shape, self.poison).to(dtype)
        if self.layout == "halves":
            self.key_cache, self.value_cache = cache.unbind(1)
        else:
            if self.layout == "heads first":
                cache = cache.transpose(1, 2)
            self.key_cache, self.value_cache = cache.split(width, dim=-1)
        self.paged_cache = cache
        if self.fp8:
            self.scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.05])}
            for name, tensors in (("k_scale", self.keys), ("v_scale", self.values)):
                for i, tensor in enumerate(tensors):
                    tensors[i] = (tensor / self.scales[name]).to(dtype).float() * self.scales[name]
        for row, k, v, context in zip(
            self.batch.requests, self.keys, self.values, self.contexts, strict=True
        ):
            oldest = max(0, context - self.window + 1) if self.window > 0 else 0
            slots = torch.arange(oldest, len(k))
            place = self.block_table[row, slots // size].long(), slots % size
            self.key_cache[place] = (k[slots] / self.scales.get("k_scale", 1.0)).to(dtype)
            self.value_cache[place] = (v[slots] / self.scales.get("v_scale", 1.0)).to(dtype)
        self.paged_batch = self._build_paged_batch()

    def _build_paged_batch(self) -> PagedBatch:
        """The trees, and after them the requests without a mask, as buffers of graphs hold them."""
        masked = [i for i in range(len(self.trees)) if i not in self.causal]
        order = [*masked, *self.causal]
        columns = (self.batch.requests, self.batch.starts, self.batch.sizes, self.batch.contexts)
        requests, starts, sizes, contexts = (column[order] for column in columns)
        count = len(masked)
        of_trees = (column[:count].numpy() for column in (requests, starts, contexts))
        batch = PagedBatch.build(TreeBatch.build([self.trees[i] for i in masked], *of_trees))
        return replace(
            batch,
            requests=requests,
            starts=starts,
            sizes=sizes,
            contexts=contexts,
            firsts=torch.cat((batch.firsts, torch.full_like(sizes[count:], CAUSAL))),
            places=sizes.cumsum(0, dtype=torch.int32) - sizes,
            tokens=torch.from_numpy(query_tokens(starts.numpy(), sizes.numpy())),
            max_size=int(sizes.max()),
            max_context=int(contexts.max()),
        )

    def run(self, impl: Attend, batch: PagedBatch | None = None) -> torch.Tensor:
        """Call `paged_attention`, or `impl` if it is a function."""
        call = PagedCall(
            query=self.query,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            output=self.output,
            block_table=self.block_table,
            batch=self.paged_batch if batch is None else batch,
            scale=self.scale,
            sliding_window=self.window,
            alibi_slopes=self.alibi_slopes,
            soft_cap=self.soft_cap,
            sinks=self.sink_logits,
            k_scale=self.scales.get("k_scale"),
            v_scale=self.scales.get("v_scale"),
        )
        if callable(impl):
            impl(call)
        else:
            paged_attention(call, impl)
        return self.output.view(len(self.query), self.heads, self.head_size)

    def check(self, impl: Attend) -> None:
        """Compare the output with the reference; rows outside of `batch` must stay NaN."""
        expected, result = self.reference(), self.run(impl).double()
        rows = expected.isfinite().flatten(1).all(1)
        assert torch.equal(result.isfinite().flatten(1).all(1), rows)
        error = (result - expected)[rows].norm(dim=-1) / expected[rows].norm(dim=-1)
        assert error.max() < ROW_ERROR[self.dtype], (
            f"the largest error of a row is {error.max():.1e}"
        )
