"""The rows of a step are written where its forward pass reads them."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import UNKNOWN, DraftForest, DraftTree
from lookahead_vllm.verify.place import NO_ENTRY, NO_SLOT, Placer, RequestTable, Split, StepRows
from tests.support.attention_cases import random_tree

ENTRIES, ROWS = 7, 90
"""Requests that the device knows, and rows of its buffers."""
STALE = 77


class Case(NamedTuple):
    """A step of some of the known requests, in a random order."""

    trees: list[DraftTree]
    """One for each request of the step; it may be empty."""
    entries: list[int]
    table: RequestTable
    num_filled: int

    @property
    def split(self) -> Split:
        drafted = [row for row, tree in enumerate(self.trees) if len(tree)]
        order = drafted[::-1]  # of the forest, not of the batch
        forest = DraftForest.of([self.trees[row] for row in order])
        split = Split(np.full(Split.size(ENTRIES, ROWS), STALE, np.int32), ENTRIES)
        split.write(forest, np.array(order, np.int64), np.array(self.entries, np.int64))
        return split


def random_case(seed: int, most: int = 9, groups: int = 1, most_requests: int = ENTRIES) -> Case:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_requests + 1))
    trees = []
    for _ in range(count):
        size = int(rng.integers(0, most + 1))
        shape = random_tree(rng, size) if rng.random() < 0.6 else DraftTree.chain([0] * size)
        tokens = rng.integers(0, 999, size)
        if not DraftForest.of([shape]).branching[0] and rng.random() < 0.5:
            tokens[:] = UNKNOWN
        trees.append(DraftTree.from_lists(tokens, shape.parents))
    sizes = tuple(int(size) for size in rng.choice([4, 8, 16], groups))
    table = RequestTable(
        torch.from_numpy(rng.integers(0, 100, ENTRIES).astype(np.int32)),
        torch.from_numpy(rng.integers(0, 999, (ENTRIES, 1))),
        torch.from_numpy(rng.integers(1000, 1999, (ENTRIES, most)).astype(np.int32)),
        tuple(
            torch.from_numpy(rng.integers(0, 999, (ENTRIES, 40 + i)).astype(np.int32))
            for i in range(groups)
        ),
        sizes,
    )
    rows = sum(1 + len(tree) for tree in trees)
    return Case(trees, rng.permutation(ENTRIES)[:count].tolist(), table, rows + seed % 8)


def stale_rows(groups: int) -> StepRows:
    """Buffers of an earlier step."""
    return StepRows(
        torch.full((ROWS,), STALE, dtype=torch.int32),
        torch.full((ROWS,), STALE),
        torch.arange(ROWS) % 2 == 0,
        torch.full((ENTRIES + 1,), STALE, dtype=torch.int32),
        torch.full((ENTRIES,), STALE, dtype=torch.int32),
        torch.full((groups, ROWS), STALE),
        torch.full((ROWS,), STALE),
        *(torch.full((ROWS,), STALE, dtype=torch.int32) for _ in range(3)),
    )


def expected(case: Case) -> tuple[StepRows, torch.Tensor]:
    """Row by row; and the lengths without the contexts of branching trees."""
    rows = stale_rows(len(case.table.blocks))
    tree_lengths = torch.zeros(ENTRIES, dtype=torch.int32)
    rows.lengths[:] = 0
    row = 0
    for request, (tree, entry) in enumerate(zip(case.trees, case.entries, strict=True)):
        context = int(case.table.num_computed[entry])
        rows.starts[request] = row
        rows.lengths[request] = context + 1 + len(tree)
        branches = DraftForest.of([tree]).branching[0]
        tree_lengths[request] = 1 + len(tree) + (0 if branches else context)
        drafted = case.table.drafted[entry, : len(tree)].tolist()
        tokens = drafted if UNKNOWN in tree.tokens else tree.tokens.tolist()
        ids = [int(case.table.last_sampled[entry]), *tokens]
        for place_of_row, (token, depth) in enumerate(zip(ids, [0, *tree.depths], strict=True)):
            rows.ids[row], rows.positions[row] = token, context + int(depth)
            rows.is_padding[row] = False
            rows.entries[row], rows.places[row], rows.depths[row] = entry, place_of_row, int(depth)
            is_root = place_of_row == 0
            parent = -1 if is_root else int(tree.parents[place_of_row - 1])
            rows.parents[row] = row if is_root else row - place_of_row + 1 + parent
            at = context + place_of_row
            for group, size in enumerate(case.table.block_sizes):
                block = int(case.table.blocks[group][entry, at // size])
                rows.slots[group, row] = block * size + at % size
            row += 1
    rows.starts[len(case.trees) :] = row
    padding = slice(row, case.num_filled)
    rows.ids[padding], rows.positions[padding], rows.is_padding[padding] = 0, 0, True
    rows.slots[:, padding], rows.entries[padding] = NO_SLOT, NO_ENTRY
    return rows, tree_lengths


def check(case: Case, rows: StepRows, tree_lengths: torch.Tensor) -> None:
    right, right_lengths = expected(case)
    for name, ours, theirs in zip(StepRows._fields, rows, right, strict=True):
        assert ours.tolist() == theirs.tolist(), name
    assert tree_lengths.tolist() == right_lengths.tolist()


def arguments_of(case: Case) -> tuple[Any, ...]:
    """The arguments of `place` but for the lengths of trees."""
    return (
        torch.from_numpy(case.split.packed),
        len(case.trees) + case.num_filled % 2,
        case.num_filled,
    )


def no_lengths() -> torch.Tensor:
    return torch.full((ENTRIES,), STALE, dtype=torch.int32)


@pytest.mark.interpreted("too")
@pytest.mark.parametrize(("most", "groups"), [(0, 1), (9, 1), (9, 3), (70, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_where_its_request_is(seed, most, groups):
    case = random_case(seed, most, groups, most_requests=1 if most == 70 else ENTRIES)
    rows, lengths = stale_rows(groups), no_lengths()
    Placer(case.table, rows).place(*arguments_of(case), lengths)
    check(case, rows, lengths)


@pytest.mark.interpreted("too")
def test_the_lengths_of_trees_may_be_contexts_alone():
    case, rows, lengths = random_case(5), stale_rows(1), no_lengths()
    Placer(case.table, rows).place(*arguments_of(case), lengths, contexts_only=True)
    check(case, rows, expected(case)[1])
    unused = [0] * (ENTRIES - len(case.entries))
    assert lengths.tolist() == [*case.table.num_computed[case.entries].tolist(), *unused]


@pytest.mark.interpreted("too")
def test_rows_that_were_written_in_another_way_are_left_alone():
    case, rows, lengths = random_case(3), stale_rows(1), no_lengths()
    split = case.split
    split.clear()
    Placer(case.table, rows).place(torch.from_numpy(split.packed), ENTRIES, ROWS, lengths)
    for ours, before in zip((*rows, lengths), (*stale_rows(1), no_lengths()), strict=True):
        assert ours.tolist() == before.tolist()


@pytest.mark.interpreted("too")
def test_a_step_in_a_graph_without_trees_has_no_lengths_of_trees():
    case = random_case(3)
    rows = stale_rows(1)
    Placer(case.table, rows).place(*arguments_of(case))
    check(case, rows, expected(case)[1])
