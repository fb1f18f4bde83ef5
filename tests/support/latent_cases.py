"""Inputs of latent attention, random, and their attention in float64."""

import math
from typing import Any

import torch

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.latent import LatentCall, latent_attention
from lookahead_vllm.verify.layout.paged_batch import PagedBatch
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from tests.support.attention_cases import ROW_ERROR


class LatentCase:
    """Trees with random latents in a paged cache; all unused slots hold NaN."""

    def __init__(
        self,
        trees: list[DraftTree],
        contexts: list[int],
        heads: int = 3,
        rank: int = 64,
        rotary: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
    ) -> None:
        torch.manual_seed(len(trees))
        self.trees, self.contexts, self.rank, self.dtype = trees, contexts, rank, dtype
        sizes = [len(tree) + 1 for tree in trees]
        width = rank + rotary
        self.scale = width**-0.5
        self.scales: dict[str, torch.Tensor] = {"cache_scale": torch.tensor([0.03])} if fp8 else {}
        self.query = torch.randn(sum(sizes), heads, width).to(dtype)
        self.output = torch.full((sum(sizes), heads, rank), math.nan, dtype=dtype)
        rows = torch.randperm(len(trees) + 2)[: len(trees)].tolist()
        starts = [7 + sum(sizes[:i]) for i in range(len(sizes))]  # the kernels do not read them
        self.batch = PagedBatch.build(TreeBatch.build(trees, rows, starts, contexts))
        longest = max(c + n for c, n in zip(contexts, sizes, strict=True)) // block_size + 2
        blocks = (len(trees) + 2) * longest
        self.block_table = torch.randperm(blocks).int().view(-1, longest)
        cache_dtype = torch.float8_e4m3fn if fp8 else dtype
        self.cache = torch.full((blocks, 2, block_size, width), math.nan).to(cache_dtype)[:, 1]
        self.latents = []
        for row, size, context in zip(rows, sizes, contexts, strict=True):
            slots = torch.arange(context + size)
            latents = torch.randn(context + size, width) / (0.03 if fp8 else 1)
            self.cache[self.block_table[row, slots // block_size].long(), slots % block_size] = (
                latents.to(cache_dtype)
            )
            self.latents.append(latents.to(cache_dtype).double() * (0.03 if fp8 else 1))

    def reference(self) -> torch.Tensor:
        """The expected output in float64, row by row."""
        output = torch.empty(self.output.shape, dtype=torch.float64)
        row = 0
        for tree, latents, context in zip(self.trees, self.latents, self.contexts, strict=True):
            parent = [-1, *(tree.parents + 1).tolist()]
            for node in range(len(tree) + 1):
                slots, ancestor = list(range(context)), node
                while ancestor >= 0:
                    slots.append(context + ancestor)
                    ancestor = parent[ancestor]
                seen = latents[slots]
                weights = (self.query[row].double() @ seen.T * self.scale).softmax(-1)
                output[row] = weights @ seen[:, : self.rank]
                row += 1
        return output

    def run(self, impl: Any) -> torch.Tensor:
        where = self.query, self.cache, self.output, self.block_table, self.batch
        call = LatentCall(*where, self.scale, self.scales.get("cache_scale"))
        if callable(impl):
            impl(call)
        else:
            latent_attention(call, impl)
        return self.output

    def check(self, impl: Any) -> None:
        result, expected = self.run(impl).double(), self.reference()
        error = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < ROW_ERROR[self.dtype]
