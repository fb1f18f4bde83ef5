"""Latent attention is exact for trees: a row attends to the context, its ancestors and itself.

`test_paged_attention.py` runs this folder's Triton tests under Triton's interpreter.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
from lookahead_vllm.verify.latent_attention import latent_attention
from lookahead_vllm.verify.tree_batch import TreeBatch
from tests.support.attention_cases import random_tree
from tests.support.latent_cases import LatentCase

HAS_TRITON = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = [
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="runs in another process")
    ),
]


def trees_of(*sizes: int) -> list[DraftTree]:
    return [random_tree(np.random.default_rng(nodes), nodes) for nodes in sizes]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16, "heads": 8},
        {"block_size": 64, "heads": 1},
        {"rank": 512, "rotary": 64, "heads": 4},
        {"rank": 48, "rotary": 8},
        {"fp8": True},
    ],
    ids=str,
)
def test_it_equals_float64(impl: str, options: dict[str, Any]) -> None:
    LatentCase(trees_of(4, 40, 0, 12), [33, 70, 5, 0], **options).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("context", [0, 1, 15, 16, 31, 32, 33, 64])
def test_every_position_of_the_end_in_a_page(impl: str, context: int) -> None:
    LatentCase(trees_of(20), [context]).check(impl)


@pytest.mark.skipif(not HAS_TRITON, reason="runs in another process")
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_splits_of_the_context_give_the_same_with_triton(num_splits: int) -> None:
    from lookahead_vllm.verify.gpu.triton_latents import attend

    for options in ({}, {"fp8": True}):
        case = LatentCase(trees_of(9, 3, 0), [300, 40, 3], **options)
        case.check(partial(attend, num_splits=num_splits))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row, bit", [(1, 2), (3, 2), (2, 1)])
def test_one_wrong_mask_bit_changes_its_row_only(impl: str, row: int, bit: int) -> None:
    case = LatentCase([DraftTree.from_lists([1, 2, 3], [-1, 0, -1])], [5])
    right = case.run(impl).clone()
    case.batch.masks[row, 0] ^= 1 << bit
    wrong = case.run(impl)
    others = [r for r in range(4) if r != row]
    assert torch.equal(right[others], wrong[others])
    assert not torch.allclose(right[row], wrong[row], atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "cuda"}, "choose 'auto', 'torch' or 'triton'"),
        ({"query": torch.zeros(3, 2, 24, dtype=torch.float64)}, "float32, bfloat16 or float16"),
        ({"cache": torch.zeros(3, 16, 24).half()}, "it holds the query's"),
        ({"cache_scale": torch.ones(1)}, "it holds the query's"),
        ({"cache": torch.zeros(3, 16, 20)}, "block_size, 24"),
        ({"output": torch.zeros(3, 2, 32)}, "output is"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int64)}, "is int32, not torch.int64"),
        ({"query": torch.zeros(3, 24, 2).transpose(1, 2)}, "contiguous"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {
        **{"query": torch.zeros(3, 2, 24), "cache": torch.zeros(3, 16, 24)},
        **{"output": torch.zeros(3, 2, 16), "scale": 1.0},
        "block_table": torch.zeros(1, 3, dtype=torch.int32),
        "batch": PagedBatch.build(TreeBatch.build([DraftTree.chain([1, 2])], [0], [0], [5])),
    }
    with pytest.raises(ValueError, match=message):
        latent_attention(**{**arguments, **change})
