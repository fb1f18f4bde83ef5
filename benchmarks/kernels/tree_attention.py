"""Compare vLLM's causal kernel on a chain with our compiled tree kernel and plain torch.

The chain has as many rows as the tree, so the ratio is the cost of a tree over that of a chain.
The kernels take turns, and the best round of each counts, to leave out noise of the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.cpu.tree_attention import tree_attention
from lookahead_vllm.verify.tree_batch import TreeBatch


def random_tree(nodes: int, rng: np.random.Generator) -> DraftTree:
    """A tree in which each node's parent is one of the four nodes before it, or the root."""
    parents = [int(rng.integers(max(-1, i - 4), i)) for i in range(nodes)]
    return DraftTree.from_lists(range(nodes), parents)


class Case:
    """The inputs of attention over one KV cache for each layer, and the kernels to run on them."""

    def __init__(self, args: argparse.Namespace, context: int, rows: int, reqs: int, dtype: str):
        self.dtype = getattr(torch, dtype)
        rng = np.random.default_rng(0)
        self.heads, self.kv_heads, self.head_size = args.heads, args.kv_heads, args.head_size
        per_request = (context + rows) // args.block_size + 1
        blocks = reqs * per_request
        shape = (blocks, self.kv_heads, args.block_size, 2 * self.head_size)
        self.caches = [torch.randn(shape).to(self.dtype) for _ in range(args.layers)]
        self.block_table = torch.randperm(blocks).int().view(reqs, per_request)
        self.query = torch.randn(reqs * rows, self.heads, self.head_size).to(self.dtype)
        self.output = torch.empty_like(self.query)
        self.starts = torch.arange(0, reqs * rows + 1, rows, dtype=torch.int32)
        self.seq_lens = torch.full((reqs,), context + rows, dtype=torch.int32)
        self.scale = self.head_size**-0.5
        self.batch = TreeBatch.build(
            [random_tree(rows - 1, rng) for _ in range(reqs)],
            np.arange(reqs),
            self.starts[:-1].numpy(),
            [context] * reqs,
        )

    def vllm(self) -> Callable[[torch.Tensor], None]:
        """vLLM's causal kernel, a function of one layer's KV cache."""
        from vllm import _custom_ops as ops

        isa = "vec" if self.head_size % 32 == 0 else "vec16"
        metadata = ops.cpu_attn_get_scheduler_metadata(
            len(self.seq_lens), self.heads, self.kv_heads, self.head_size, self.seq_lens,
            self.dtype, self.starts, True, -1, isa, True,
        )  # fmt: skip

        def run(cache: torch.Tensor) -> None:
            blocks, kv_heads, block_size, _ = cache.shape
            k, v = cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
            ops.cpu_attention_with_kv_cache(
                self.query, k, v, self.output, self.starts, self.seq_lens, self.scale, True,
                None, -1, self.block_table, 0.0, metadata, None,
            )  # fmt: skip

        return run

    def tree(self, impl: str) -> Callable[[torch.Tensor], None]:
        """`tree_attention` with this implementation."""

        def run(cache: torch.Tensor) -> None:
            tree_attention(
                self.query, cache, self.output, self.block_table, self.batch,
                scale=self.scale, impl=impl,  # type: ignore[arg-type]
            )  # fmt: skip

        return run


def microseconds(
    kernels: list[Callable[[torch.Tensor], None]], caches: list[torch.Tensor], seconds: float
) -> list[float]:
    """Microseconds a call of each kernel, in its best round over all layers."""
    times: list[list[float]] = [[] for _ in kernels]
    for kernel in kernels:
        kernel(caches[0])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for kernel, samples in zip(kernels, times, strict=True):
            start = time.perf_counter()
            for cache in caches:
                kernel(cache)
            samples.append((time.perf_counter() - start) / len(caches) * 1e6)
    return [min(samples) for samples in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--reqs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=4, help="number of KV caches, used in turn")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for a line of the table")
    parser.add_argument("--threads", type=int, help="torch threads")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    print(f"{args.heads} heads, {args.kv_heads} KV heads, head size {args.head_size}, block size")
    print(f"{args.block_size}, {torch.get_num_threads()} threads; microseconds a call\n")
    print(
        "| dtype | reqs | context | rows | vLLM chain | tree | torch tree "
        "| tree / vLLM | torch / vLLM |"
    )
    print("| --- " * 9 + "|")
    for dtype in args.dtypes:
        for reqs in args.reqs:
            for context in args.contexts:
                for rows in args.rows:
                    case = Case(args, context, rows, reqs, dtype)
                    kernels = [case.vllm(), case.tree("native"), case.tree("torch")]
                    chain, tree, slow = microseconds(kernels, case.caches, args.seconds)
                    print(
                        f"| {dtype} | {reqs} | {context} | {rows} | {chain:.0f} | {tree:.0f} "
                        f"| {slow:.0f} | {tree / chain:.2f} | {slow / chain:.2f} |",
                        flush=True,
                    )
