"""Requests with draft trees and a paged KV cache, as inputs of tree attention on a GPU."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lookahead_vllm.verify.attention import PagedCall, paged_attention
from lookahead_vllm.verify.attention.reference import reference_paged_attention
from lookahead_vllm.verify.layout.paged_batch import CAUSAL, PagedBatch

DEVICE = "cuda"
IMPLS = ("reference", "triton", "xformers")
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Allowed distance of a row from float64, relative to the row's length."""
FP8_FACTOR = 4
"""A row read from an fp8 cache may be off by so many times `MAX_ERROR`."""


def tree_parents(nodes: int, rng: random.Random) -> list[int]:
    """Parents in a random tree: one of the eight nodes before each, or the root (-1)."""
    return [rng.randrange(max(-1, i - 8), i) if i else -1 for i in range(nodes)]


def depths_and_masks(parents: Sequence[int], words: int) -> tuple[list[int], list[list[int]]]:
    """Depth and mask (`words` of 32 bits) of each row of a tree, root first; see `PagedBatch`."""
    depths, ancestors = [0], [1]
    for node, parent in enumerate(parents):
        depths.append(depths[parent + 1] + 1)
        ancestors.append(ancestors[parent + 1] | 1 << (node + 1))
    masks = [
        [_signed(bits >> 32 * word & 0xFFFFFFFF) for word in range(words)] for bits in ancestors
    ]
    return depths, masks


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a row, relative to the row's length; inf for NaN."""
    distances = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(distances.nan_to_num(math.inf).max())


@dataclass
class Case:
    """A batch of requests with random K/V in pages, on the GPU. Unused slots hold NaN."""

    contexts: Sequence[int]
    nodes: Sequence[int]
    """Nodes of each request's draft, without the root."""
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: Sequence[int] = ()
    """Requests with a chain or a prompt, which have no mask."""
    heads_first: bool = False
    fp8: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """`sliding_window` and `soft_cap`; True for `alibi_slopes` or `sinks` draws them."""
    pages_before: int = 0
    """Pages of no request, before those of the requests; they hold anything."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.sizes = [nodes + 1 for nodes in self.nodes]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.batch = self._make_batch()
        self.cache, self.block_table = self._make_cache()
        self.key_cache, self.value_cache = self.cache.split(self.head_size, dim=-1)
        shape = (sum(self.sizes), self.heads, self.head_size)
        self.query = torch.randn(shape, device=DEVICE, dtype=self.dtype)
        self.output = torch.full_like(self.query, math.nan)
        per_head = torch.linspace(0.01, 1, self.heads, device=DEVICE)
        fp8_scale = torch.ones(1, device=DEVICE) if self.fp8 else None
        self.call = PagedCall(
            self.query, self.key_cache, self.value_cache, self.output, self.block_table, self.batch,
            scale=self.head_size**-0.5,
            sliding_window=self.options.get("sliding_window", -1),
            alibi_slopes=per_head if self.options.get("alibi_slopes") else None,
            soft_cap=self.options.get("soft_cap", 0.0),
            sinks=per_head if self.options.get("sinks") else None,
            k_scale=fp8_scale,
            v_scale=fp8_scale,
        )  # fmt: skip

    def _make_batch(self) -> PagedBatch:
        """A random tree for each request that is not causal."""
        rng = random.Random(0)
        sizes, count = self.sizes, len(self.sizes)
        tree_sizes = [sizes[i] for i in range(count) if i not in self.causal]
        words = (max(tree_sizes, default=1) + 31) // 32
        depths: list[int] = []
        masks: list[list[int]] = []
        firsts = []
        for i, nodes in enumerate(self.nodes):
            firsts.append(CAUSAL if i in self.causal else len(depths))
            if i not in self.causal:
                tree_depths, tree_masks = depths_and_masks(tree_parents(nodes, rng), words)
                depths += tree_depths
                masks += tree_masks

        def ints(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        return PagedBatch(
            ints(range(count)), ints(self.starts), ints(sizes), ints(self.contexts), ints(firsts),
            ints(self.starts), ints(depths), ints(masks).view(-1, words), ints(range(sum(sizes))),
            max(sizes), max(self.contexts),
        )  # fmt: skip

    def _make_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V [pages, page_size, kv_heads, 2 * head_size] and the block table, pages shuffled."""
        count = len(self.sizes)
        lengths = [c + s for c, s in zip(self.contexts, self.sizes, strict=True)]
        pages = max(lengths) // self.page_size + 1
        block_table = torch.randperm(count * pages, device=DEVICE).int().view(count, pages)
        block_table += self.pages_before
        all_pages = self.pages_before + count * pages
        shape = (all_pages, self.page_size, self.kv_heads, 2 * self.head_size)
        if self.heads_first:
            shape = (shape[0], shape[2], shape[1], shape[3])
        cache = torch.empty(shape, device=DEVICE, dtype=self.dtype)
        cache[self.pages_before :] = math.nan
        if self.fp8:
            cache = cache.to(torch.float8_e4m3fn)
        if self.heads_first:
            cache = cache.transpose(1, 2)
        for row, length in enumerate(lengths):
            slots = torch.arange(length, device=DEVICE)
            place = block_table[row, slots // self.page_size].long(), slots % self.page_size
            values = torch.randn(len(slots), self.kv_heads, 2 * self.head_size, device=DEVICE)
            cache[place] = values.to(cache.dtype)
        return cache, block_table

    @property
    def max_error(self) -> float:
        """What `error` may be."""
        return MAX_ERROR[self.dtype] * (FP8_FACTOR if self.fp8 else 1)

    def run(self, impl: str) -> None:
        """Write `output`; ValueError where the implementation cannot do this case."""
        paged_attention(self.call, impl)  # type: ignore[arg-type]

    def error(self, impl: str) -> float:
        """The largest distance of a row from float64, relative to the row's length."""
        self.output.fill_(math.nan)
        self.run(impl)
        return self.distance()

    def distance(self) -> float:
        """The same of what `output` holds."""
        largest = 0.0
        for start, expected in reference_paged_attention(self.call, torch.float64):
            found = self.output[start : start + len(expected)]
            largest = max(largest, distance(found, expected))
        return largest


def kernel_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names and makers of cases over dtypes, head sizes, cache layouts, head counts and options."""
    for dtype, head_size in itertools.product(MAX_ERROR, (64, 80, 96, 128, 192, 256)):
        name = f"{str(dtype).removeprefix('torch.')}, head size {head_size}"
        for heads_first in (False, True):
            order = "heads first" if heads_first else "tokens first"
            yield (
                f"{name}, {order}",
                partial(
                    Case, [0, 1, 700, 3000, 16], [16, 128, 0, 33, 200], head_size=head_size,
                    dtype=dtype, causal=(4,), heads_first=heads_first,
                ),
            )  # fmt: skip
    for heads, kv_heads in ((8, 8), (7, 1), (32, 4), (71, 1)):
        name = f"{heads} heads, {kv_heads} KV heads"
        yield name, partial(Case, [513, 40], [60, 5], heads=heads, kv_heads=kv_heads)
    for options in (
        {"sliding_window": 100},
        {"soft_cap": 20.0},
        {"alibi_slopes": True},
        {"sinks": True},
        {"sliding_window": 40, "soft_cap": 5.0, "alibi_slopes": True, "sinks": True},
    ):
        for contexts in ([500, 30, 2], [20_000, 3, 7]):
            name = ", ".join(options) + f", contexts of {contexts[0]}"
            yield name, partial(Case, contexts, [40, 7, 90], options=options, causal=(2,))
    if torch.cuda.get_device_capability() >= (8, 9):
        yield "fp8 cache", partial(Case, [900, 5], [30, 60], fp8=True, causal=(1,))
    contexts, nodes = list(range(10, 2000, 31))[:64], [i % 40 for i in range(64)]
    yield "64 requests", partial(Case, contexts, nodes)
