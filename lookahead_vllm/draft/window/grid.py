"""The 2D window of the lookahead branch, and the comb that adds it to a draft tree.

Source: Lookahead Decoding (Fu et al., ICML 2024), section 3.1, Algorithm 2 and Figure 2(b).

A window has W columns, which are positions of the text, and N - 1 levels, which are past steps.
Level 0, the oldest, is a chain that starts at the root (column 0). Cell (k, j) of a later level k
is a child of cell (k - 1, j), at depth j + k. These cells are the comb. As nodes of a draft tree
they have the mask and the positions of the paper. The model's choices after the cells of the last
level become the next level: one Jacobi iteration, and W n-grams, one in each column.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.request_rows import RequestRows
from lookahead_vllm.draft.sources import WINDOW
from lookahead_vllm.draft.tree import DraftForest, ForestArrays, ForestFields, first_nodes
from lookahead_vllm.options.window import WindowShape

ROOT, ABSENT = -1, -2  # in `cells`, in addition to node indices

_NUM_SEEDS = 64  # tokens of a prompt from which guesses are drawn
_MULTIPLIER, _INCREMENT = np.uint64(6364136223846793005), np.uint64(1442695040888963407)


class _CombLimits(NamedTuple):
    """How large the trees may be, and the probability of nodes that only a comb adds."""

    max_nodes: Int64s
    """int64 [t]; `max_depths` likewise."""
    max_depths: Int64s
    prob: np.float32


class VerifiedCombs(NamedTuple):
    """The model's choices in the trees of a step that had combs."""

    roots: Int64s
    """int64 [t]: the row of each root. Its nodes' rows follow, in order."""
    sizes: Int64s
    """int64 [t]: the number of verified nodes of each tree."""
    best: Int32s
    """int32 [m]: the likeliest token at each row of logits."""


class WindowArrays(NamedTuple):
    """The arrays of `Windows`, as the kernels take them."""

    tokens: Int32s
    """int32 [capacity, N - 1, W + N - 2]: the guess in each level and column. Column 0 of level 0
    is the root, which has no guess."""
    cells: Int32s
    """int32 [capacity, N - 1, W + N - 2]: the node of each guess in the tree that was sent last;
    ROOT, or ABSENT."""
    filled: Int32s
    """int32 [capacity]: the number of filled levels."""
    seeds: Int32s
    """int32 [capacity, 1 + _NUM_SEEDS]: the number of seeds, then the seeds."""
    draws: NDArray[np.uint64]
    """uint64 [capacity]: the states of the random generators."""


class Windows:
    """The windows of the live requests, all of one shape, each at its own phase."""

    def __init__(self, shape: WindowShape) -> None:
        self.request_rows = RequestRows()
        capacity, levels = self.request_rows.capacity, shape.ngram_size - 1
        columns = shape.columns(1)
        self.arrays = WindowArrays(
            np.zeros((capacity, levels, columns), np.int32),
            np.full((capacity, levels, columns), ABSENT, np.int32),
            np.zeros(capacity, np.int32),
            np.zeros((capacity, 1 + _NUM_SEEDS), np.int32),
            np.zeros(capacity, np.uint64),
        )

    def start(self, request_id: str, prompt: Int32s) -> None:
        """Add a window whose level 0 is drawn from the prompt int32 [n]."""
        row = self.request_rows.add(request_id)
        self.arrays = WindowArrays(*(self.request_rows.resized(array) for array in self.arrays))
        num_seeds = min(_NUM_SEEDS, len(prompt))
        seeds = prompt[np.linspace(0, len(prompt) - 1, num_seeds).astype(np.int64)]
        self.arrays.seeds[row, 0] = num_seeds
        self.arrays.seeds[row, 1 : 1 + num_seeds] = seeds
        self.arrays.draws[row] = 1
        self.restart(np.array([row]))

    def finish(self, request_id: str) -> None:
        """The request has ended; an unknown one is ignored."""
        self.request_rows.pop(request_id)

    def restart(self, rows: Int64s) -> None:
        """Draw level 0 of these windows again and forget the other levels."""
        _restart(rows, self.arrays[:])

    def comb_nodes(self, rows: Int64s) -> Int64s:
        """int64 [t]: the nodes of each window's comb as it is now; 0 for a row below 0."""
        filled = self.arrays.filled[rows].astype(np.int64)
        return np.where(rows < 0, 0, filled * (self.arrays.tokens.shape[2] + 1 - filled) - 1)

    def append_combs(
        self,
        forest: DraftForest,
        rows: Int64s,
        max_nodes: Int64s,
        max_depths: Int64s,
        prob: float,
    ) -> DraftForest:
        """Add to each tree the comb of window `rows[i]`, int64 [t]; none if it is negative.

        A cell whose path is in the tree already reuses that node. Nodes beyond `max_nodes` and
        `max_depths`, int64 [t], are left out. The new nodes are last, and their probability is
        `prob` or that of the last node before them, whichever is less.
        """
        limits = max_nodes, max_depths, np.float32(prob)
        return DraftForest(*_append_combs(forest.arrays, rows, limits, self.arrays[:]))

    def iterate(self, rows: Int64s, verified: VerifiedCombs) -> None:
        """One Jacobi iteration of the windows `rows` int64 [t], whose combs were verified.

        When several tokens were accepted at once, a window moves as after one, as in the authors'
        code; by as many positions, or levels as in Algorithm 2, fewer tokens are accepted.
        """
        _iterate(rows, tuple(verified), self.arrays[:])


@kernel
def _draw(windows: WindowArrays, row: int) -> np.int32:
    seeds, draws = windows.seeds, windows.draws
    draws[row] = draws[row] * _MULTIPLIER + _INCREMENT
    at = np.int64(draws[row] >> np.uint64(33)) % seeds[row, 0]
    return seeds[row, 1 + at]


@kernel
def _restart(rows: Int64s, windows: WindowArrays) -> None:
    windows = WindowArrays(*windows)
    for row in rows:
        windows.filled[row] = 1
        for column in range(1, windows.tokens.shape[2]):
            windows.tokens[row, 0, column] = _draw(windows, row)


@kernel
def _append_combs(
    forest: ForestArrays, rows: Int64s, limits: _CombLimits, windows: WindowArrays
) -> ForestFields:
    forest, limits, windows = ForestArrays(*forest), _CombLimits(*limits), WindowArrays(*windows)
    guesses, cells = windows.tokens, windows.cells
    capacity = len(forest.tokens)
    for row in rows:
        if row >= 0:
            capacity += windows.filled[row] * guesses.shape[2]
    tokens, parents = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    depths, probs = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
    sources = np.empty(capacity, np.uint8)
    firsts = np.zeros(len(forest.firsts), np.int64)
    end = 0
    for tree, row in enumerate(rows):
        first = end
        for node in range(forest.firsts[tree], forest.firsts[tree + 1]):
            tokens[end], parents[end] = forest.tokens[node], forest.parents[node]
            depths[end], probs[end] = forest.depths[node], forest.probs[node]
            sources[end] = forest.sources[node]
            end += 1
        if row >= 0:
            prob = limits.prob if end == first else min(limits.prob, probs[end - 1])
            filled = windows.filled[row]
            columns = guesses.shape[2] + 1 - filled
            cells[row] = ABSENT
            cells[row, 0, 0] = ROOT
            for cell in range(1, filled * columns):
                level, column = cell // columns, cell % columns
                parent = cells[row, level - 1, column] if level else cells[row, 0, column - 1]
                if parent == ABSENT or level + column > limits.max_depths[tree]:
                    continue
                token = guesses[row, level, column]
                here = _child(tokens[first:end], parents[first:end], parent, token)
                if here == ABSENT and end - first < limits.max_nodes[tree]:
                    here = end - first
                    tokens[end], parents[end] = token, parent
                    depths[end], probs[end], sources[end] = level + column, prob, WINDOW
                    end += 1
                cells[row, level, column] = here
        firsts[tree + 1] = end
    return first_nodes(ForestArrays(tokens, parents, probs, depths, sources, firsts), end)


@kernel
def _child(tokens: Int32s, parents: Int32s, parent: int, token: int) -> int:
    """The node of a tree with this parent and token, or ABSENT."""
    for node in range(parent + 1, len(tokens)):
        if parents[node] == parent and tokens[node] == token:
            return node
    return ABSENT


@kernel
def _iterate(rows: Int64s, verified: VerifiedCombs, windows: WindowArrays) -> None:
    verified, windows = VerifiedCombs(*verified), WindowArrays(*windows)
    tokens = windows.tokens
    levels = tokens.shape[1]
    for tree, row in enumerate(rows):
        filled = windows.filled[row]
        columns = tokens.shape[2] + 1 - filled
        window, last = tokens[row], windows.cells[row, filled - 1]
        choices = np.empty(columns, np.int32)
        for column in range(columns):
            cell = last[column]
            if cell == ROOT:
                choices[column] = verified.best[verified.roots[tree]]
            elif 0 <= cell < verified.sizes[tree]:
                choices[column] = verified.best[verified.roots[tree] + 1 + cell]
            else:  # it was not verified
                choices[column] = _draw(windows, row)
        if filled == levels:
            _push_level(window, choices, columns)
        else:
            # The text is a token longer, so the filled levels move on by a column.
            for level in range(filled):
                window[level, : columns - 1] = window[level, 1:columns].copy()
            window[filled, : columns - 1] = choices[1:]
            windows.filled[row] = filled + 1


@kernel
def _push_level(window: Int32s, choices: Int32s, columns: int) -> None:
    """Remove the oldest level and append `choices` as the newest."""
    for level in range(len(window) - 1):
        window[level, :columns] = window[level + 1, :columns]
    window[-1, :columns] = choices[:columns]
