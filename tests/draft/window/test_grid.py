"""The window is that of the paper, and its comb is a draft tree."""

import numpy as np
import pytest

from lookahead_vllm.draft.sources import WINDOW
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.window.grid import ABSENT, ROOT, Windows
from lookahead_vllm.options.window import WindowShape, paper_window_size
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from tests.support.valid_trees import check

FIGURE_2B = """
x0 0: x0
a1 1: x0 a1
a2 2: x0 a1 a2
a3 3: x0 a1 a2 a3
a4 4: x0 a1 a2 a3 a4
b0 1: x0 b0
b1 2: x0 a1 b1
b2 3: x0 a1 a2 b2
b3 4: x0 a1 a2 a3 b3
b4 5: x0 a1 a2 a3 a4 b4
c0 2: x0 b0 c0
c1 3: x0 a1 b1 c1
c2 4: x0 a1 a2 b2 c2
c3 5: x0 a1 a2 a3 b3 c3
c4 6: x0 a1 a2 a3 a4 b4 c4
g1 1: x0 g1
g2 2: x0 g1 g2
g3 3: x0 g1 g2 g3
h1 1: x0 h1
h2 2: x0 h1 h2
h3 3: x0 h1 h2 h3
"""
"""Figure 2(b), W = 5, N = 4, G = 2: what each token may see, after its position.

x0 is the current token; a, b and c are the window's levels, oldest first, by column; g and h are
the two n-grams that are verified.
"""


def full_window(shape, levels):
    """One window with these levels, int [N - 1, W], all filled."""
    windows = Windows(shape)
    windows.start("r", np.array([1, 2, 3], np.int32))
    (row,) = windows.request_rows.rows_of(["r"])
    windows.arrays.filled[row] = shape.ngram_size - 1
    windows.arrays.tokens[row, :, : shape.window_size] = levels
    return windows, np.array([row])


def add_comb(windows, rows, tree, max_nodes=128, max_depth=64):
    forest = windows.append_combs(
        DraftForest.of([tree]), rows, np.array([max_nodes]), np.array([max_depth]), 0.001
    )
    return forest[0]


def test_mask_and_positions_are_those_of_figure_2b():
    names = [line.split()[0] for line in FIGURE_2B.split("\n") if line]
    token = {name: i for i, name in enumerate(names)}
    levels = [[token.get(f"{level}{column}", 0) for column in range(5)] for level in "abc"]
    windows, rows = full_window(WindowShape(5, 4), levels)
    ngrams = [token[name] for name in ("g1", "g2", "g3", "h1", "h2", "h3")]
    tree = add_comb(windows, rows, DraftTree.from_lists(ngrams, [-1, 0, 1, -1, 3, 4]))
    assert len(tree) == 14 + 6

    batch = TreeBatch.build([tree], [0], [0], [100])
    here = [names[0], *(names[t] for t in tree.tokens)]
    for row, (mask, depth) in enumerate(
        zip(batch.masks[:, 0].tolist(), batch.depths.tolist(), strict=True)
    ):
        sees = sorted(here[bit] for bit in range(len(here)) if mask >> bit & 1)
        (line,) = [line for line in FIGURE_2B.split("\n") if line.startswith(here[row])]
        head, seen = line.split(":")
        assert (sees, depth) == (sorted(seen.split()), int(head.split()[1]))


def test_cells_on_a_path_that_is_there_already_are_its_nodes():
    windows, rows = full_window(WindowShape(3, 3), [[0, 5, 6], [7, 8, 9]])
    # A candidate that begins as level 0 does, and one that is the first column.
    tree = add_comb(windows, rows, DraftTree.from_lists([5, 6, 7], [-1, 0, -1]))
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9]
    assert tree.parents.tolist() == [-1, 0, -1, 0, 1]
    assert tree.sources.tolist() == [0, 0, 0, WINDOW, WINDOW]
    assert windows.arrays.cells[rows[0], :, :3].tolist() == [[ROOT, 0, 1], [2, 3, 4]]


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(3, 64), (128, 2), (1, 1), (0, 64)])
def test_cells_beyond_the_limits_are_absent(max_nodes, max_depth):
    windows, rows = full_window(WindowShape(3, 3), [[0, 5, 6], [7, 8, 9]])
    tree = add_comb(windows, rows, DraftTree.chain([]), max_nodes, max_depth)
    check(tree, vocab_size=10, max_nodes=max_nodes)
    assert tree.depths.max(initial=0) <= max_depth
    cells = windows.arrays.cells[rows[0], :, :3]
    assert len({c for c in cells.ravel().tolist() if c >= 0}) == len(tree) < 5
    assert (cells == ABSENT).any()


def test_the_paper_s_sizes():
    assert [paper_window_size(n) for n in (1e8, 7e9, 13e9, 34e9, 70e9)] == [15, 15, 10, 7, 7]
    assert WindowShape(5, 4).nodes == 14 and WindowShape(0, 5).nodes == 0
