"""Latent attention is exact for trees: a row attends to the context, its ancestors and itself."""

from functools import partial

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftTree
from tests.support.attention_cases import IMPLS, random_tree
from tests.support.latent_cases import LatentCase


def trees_of(*sizes: int) -> list[DraftTree]:
    return [random_tree(np.random.default_rng(nodes), nodes) for nodes in sizes]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16, "heads": 8},
        {"block_size": 64, "heads": 1, "rank": 512, "rotary": 64},
        {"rank": 48, "rotary": 8},
        {"fp8": True},
    ],
    ids=str,
)
def test_it_equals_float64(impl, options):
    LatentCase(trees_of(40, 0, 3), [33, 5, 0], **options).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("context", [15, 16, 31, 32])
def test_every_position_of_the_end_in_a_page(impl, context):
    LatentCase(trees_of(20), [context]).check(impl)


@pytest.mark.interpreted
@pytest.mark.parametrize(("num_splits", "fp8"), [(2, False), (3, True), (7, False)])
def test_splits_of_the_context_give_the_same(num_splits, fp8):
    from lookahead_vllm.verify.latent.triton import attend

    LatentCase(trees_of(9, 3, 0), [300, 40, 3], fp8=fp8).check(
        partial(attend, num_splits=num_splits)
    )
