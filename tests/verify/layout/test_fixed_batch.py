"""The buffers of a captured graph: fixed, filled in one copy, and unused entries have no effect."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.verify.layout.fixed_batch import FixedBatch
from lookahead_vllm.verify.layout.paged_batch import PagedBatch
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from lookahead_vllm.verify.place import Split
from tests.support.attention_cases import IMPLS, PagedAttentionCase, random_tree

POISON = 0x7FFFFFF0


def case_of(seed: int, sizes: list[int]) -> PagedAttentionCase:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size) for size in sizes]
    contexts = [int(rng.integers(0, 90)) for _ in sizes]
    return PagedAttentionCase(trees, contexts, head_size=64, seed=seed, gap=2)


def empty_split(most_requests, most_rows):
    return Split(np.zeros(Split.size(most_requests, most_rows), np.int32), most_requests)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("num_tokens", "steps"),
    [(64, [[33, 2, 2], [2], [3, 9, 2, 2, 5]]), (16, [[15], [2, 2, 3], [2] * 5])],
    ids=["one program for a context", "several programs"],
)
def test_each_step_has_its_own_trees_at_the_same_addresses(impl, num_tokens, steps):
    fixed = FixedBatch(num_tokens, max_requests=8, max_size=40, max_context=1000, device="cpu")
    fields = ("requests", "starts", "sizes", "contexts", "firsts", "depths", "masks", "tokens")
    tensors = {name: getattr(fixed.batch, name) for name in fields}
    addresses = {name: (t.data_ptr(), t.shape) for name, t in tensors.items()}
    for seed, sizes in enumerate(steps):
        case = case_of(seed, sizes)
        fixed._packed.fill_(POISON)  # what the last step left
        fixed.fill(case.batch)
        assert fixed.num_trees == len(sizes)
        case.paged_batch = fixed.batch
        case.check(impl)
        found = {name: getattr(fixed.batch, name) for name in fields}
        assert {name: (t.data_ptr(), t.shape) for name, t in found.items()} == addresses
        expected = PagedBatch.build(case.batch)
        assert torch.equal(fixed.batch.sizes[: len(sizes)], expected.sizes)
        used = expected.tokens.tolist()
        assert fixed.batch.tokens.tolist() == used + [-1] * (num_tokens - len(used))


@pytest.mark.parametrize("holds_all", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_forest_fills_the_buffers_as_its_branching_trees_do(seed, holds_all):
    rng = np.random.default_rng(seed)
    trees = [
        random_tree(rng, size) if size % 2 else DraftTree.chain([0] * size)
        for size in rng.integers(0, 12, 7)
    ]
    sizes = np.array([len(tree) + 1 for tree in trees])
    rows, contexts = rng.permutation(7), rng.integers(0, 900, 7)
    starts = np.zeros(8, np.int32)
    starts[1:] = np.cumsum(sizes[np.argsort(rows)])
    on_device = torch.zeros(8, dtype=torch.int32) if holds_all else None
    fixed = FixedBatch(96, 8, max_size=40, max_context=1000, device="cpu", contexts=on_device)
    split, alone = empty_split(8, 96), empty_split(8, 96)
    entries = rng.permutation(7)
    fixed.write(split, DraftForest.of(trees), rows, entries, contexts)
    fixed.upload()
    alone.write(DraftForest.of(trees), rows, entries)
    assert np.array_equal(split.packed, alone.packed)
    assert np.array_equal(split.starts, starts)
    found, num_trees = fixed._packed.clone(), fixed.num_trees
    chosen = np.flatnonzero(DraftForest.of(trees).branching)
    branching = [trees[i] for i in chosen]
    of_trees = rows[chosen], starts[rows[chosen]], contexts[chosen]
    fixed.fill(TreeBatch.build(branching, *of_trees), starts)
    assert torch.equal(found, fixed._packed) and num_trees == fixed.num_trees == len(chosen)


def test_a_step_is_filled_in_before_the_device_has_read_the_last_one():
    fixed = FixedBatch(16, max_requests=8, max_size=40, max_context=1000, device="cpu")
    read_later: list[torch.Tensor] = []
    fixed._packed = SimpleNamespace(
        device="cpu", copy_=lambda source, non_blocking: read_later.append(source)
    )  # type: ignore[assignment]
    expected = []
    for case in (case_of(0, [9]), case_of(1, [2, 3])):
        fixed.fill(case.batch)
        expected.append(fixed._host.clone())
    assert not torch.equal(*expected)
    assert all(map(torch.equal, read_later, expected))


@pytest.mark.parametrize("impl", IMPLS)
def test_without_trees_no_row_is_written(impl):
    case = case_of(0, [4, 4])
    fixed = FixedBatch(16, max_requests=8, max_size=40, max_context=1000, device="cpu")
    fixed.fill(case.batch)
    fixed._packed.fill_(POISON)
    fixed.fill(None)
    assert fixed.num_trees == 0
    assert case.run(impl, fixed.batch).isnan().all()
    # The smallest graph has no room for a branching tree.
    smallest = FixedBatch(2, max_requests=8, max_size=40, max_context=1000, device="cpu")
    assert not len(smallest.batch)
    assert case.run(impl, smallest.batch).isnan().all()


def test_the_expected_number_of_trees_limits_the_splits_only():
    for tokens, requests, entries, expected in ((64, 32, 21, 8), (64, 4, 4, 4), (4, 4, 1, 1)):
        batch = FixedBatch(tokens, requests, max_size=9, max_context=99, device="cpu").batch
        assert (len(batch), batch.expected_requests) == (entries, expected)


@pytest.mark.parametrize(
    "step",
    [([2] * 5, 8, 3), ([2, 9], 16, 3), ([5, 5, 5], 16, 3), ([2, 2], 16, 200)],
    ids=["too many trees", "too large a tree", "too many rows", "too long a context"],
)
def test_a_step_that_does_not_fit_is_refused(step):
    sizes, tokens, context = step
    fixed = FixedBatch(tokens, max_requests=4, max_size=7, max_context=100, device="cpu")
    trees = [DraftTree.from_lists(range(n), [-1] * n) for n in sizes]
    starts = np.cumsum([0, *(n + 1 for n in sizes)])
    batch = TreeBatch.build(trees, range(len(sizes)), starts[:-1], [context] * len(sizes))
    refused = pytest.raises(ValueError, match="do not fit into buffers")
    with refused:
        fixed.fill(batch)
    contexts = np.full(len(sizes), context)
    with refused:
        rows = np.arange(len(sizes))
        fixed.write(empty_split(8, 96), DraftForest.of(trees), rows, rows, contexts)
