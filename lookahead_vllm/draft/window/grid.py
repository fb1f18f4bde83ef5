"""The 2D window of the lookahead branch, and the comb in which it joins a draft tree.

Source: Lookahead Decoding (Fu et al., ICML 2024), section 3.1, Algorithm 2 and Figure 2(b).

The window guesses the next W positions of a text, each from N - 1 past steps. Level 0, the oldest,
is a chain below the root, which is its first column; the cell of level k and column j hangs from
that of level k - 1 in its column, j + k below the root. So the mask and the positions of the paper
are those of this tree. What the model says after the cells of the last level is the next level:
one Jacobi iteration, and W n-grams, one in each column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.request_rows import RequestRows
from lookahead_vllm.draft.sources import WINDOW
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.window.shape import WindowShape, columns_of

SHIFT_ONE, SHIFT_HITS, SHIFT_LEVELS = range(3)
"""What becomes of the window when several tokens are accepted at once: it moves on as after one
(the authors' code), by so many positions, or by so many levels (Algorithm 2)."""

ROOT, ABSENT = -1, -2  # in `cells`, beside the numbers of nodes

_SIZE, _NGRAM, _FILLED = range(3)  # of `shapes`
_SEEDS = 64  # tokens of a prompt from which guesses are drawn
_MULTIPLIER, _INCREMENT = np.uint64(6364136223846793005), np.uint64(1442695040888963407)


class Windows:
    """The windows of the live requests, each of its own shape and at its own phase.

    Parameters
    ----------
    most : WindowShape
        No window has more columns, or levels.

    Attributes
    ----------
    tokens : int32 [capacity, N - 1, W + N - 2]
        The guess in each level and column. The root's own column of level 0 is not used.
    cells : int32 [capacity, N - 1, W + N - 2]
        The node of each of them in the tree that was sent last; ROOT, or ABSENT.
    shapes : int32 [capacity, 3]
        W, N, and how many levels are filled.
    """

    def __init__(self, most: WindowShape) -> None:
        self.request_rows = RequestRows()
        capacity, levels = self.request_rows.capacity, most.ngram_size - 1
        columns = columns_of(*most, 1)
        self.tokens: Int32s = np.zeros((capacity, levels, columns), np.int32)
        self.cells: Int32s = np.full((capacity, levels, columns), ABSENT, np.int32)
        self.shapes: Int32s = np.zeros((capacity, 3), np.int32)
        self._seeds: Int32s = np.zeros((capacity, _SEEDS + 1), np.int32)
        self._draws: NDArray[np.uint64] = np.zeros(capacity, np.uint64)

    def start(self, request_id: str, prompt: Int32s, shape: WindowShape) -> None:
        """Another window, whose level 0 is drawn from the prompt int32 [n]."""
        number = self.request_rows.add(request_id)
        widened = self.request_rows.widened
        self.tokens, self.cells = widened(self.tokens), widened(self.cells)
        self.shapes, self._seeds = widened(self.shapes), widened(self._seeds)
        self._draws = widened(self._draws)
        seeds = prompt[np.linspace(0, len(prompt) - 1, min(_SEEDS, len(prompt))).astype(np.int64)]
        self._seeds[number, 0] = len(seeds)
        self._seeds[number, 1 : 1 + len(seeds)] = seeds
        self._draws[number] = 1
        self.shapes[number] = *shape, 0
        self.restart(np.array([number]))

    def finish(self, request_id: str) -> None:
        """The request has ended; an unknown one is ignored."""
        self.request_rows.pop(request_id)

    def restart(self, numbers: Int64s) -> None:
        """Draw level 0 of these windows anew and forget the others."""
        _restart(numbers, self.tokens, self.shapes, self._seeds, self._draws)

    def comb_nodes(self, numbers: Int64s) -> Int64s:
        """int64 [t]: the nodes of each one's comb as it is now; 0 for a number below 0."""
        size, ngram, filled = self.shapes[numbers].astype(np.int64).T
        return np.where(numbers < 0, 0, filled * columns_of(size, ngram, filled) - 1)

    def append_combs(
        self,
        forest: DraftForest,
        numbers: Int64s,
        max_nodes: Int64s,
        max_depths: Int64s,
        prob: float,
    ) -> DraftForest:
        """The trees of `forest` with the combs of these windows, int64 [t]; below 0 for none.

        A cell whose path is in the tree already is that node. Nodes that there is no room for
        (`max_nodes`, `max_depths` int64 [t]) are left out. The new nodes stand last, and their
        probability is `prob` or that of the last node before them, if that is less.
        """
        return DraftForest(
            *_append_combs(
                forest.tokens,
                forest.parents,
                forest.probs,
                forest.depths,
                forest.sources,
                forest.firsts,
                numbers,
                max_nodes,
                max_depths,
                np.float32(prob),
                self.tokens,
                self.cells,
                self.shapes,
            )
        )

    def iterate(
        self,
        numbers: Int64s,
        roots: Int32s,
        firsts: Int64s,
        sizes: Int64s,
        at_roots: Int32s,
        at_nodes: Int32s,
        lengths: Int64s,
        shift: int,
    ) -> tuple[Int32s, Int64s]:
        """One Jacobi iteration of these windows, int64 [t], whose combs were verified.

        Parameters
        ----------
        roots : int32 [t]
            The last token before the step.
        firsts, sizes : int64 [t]
            The first node of each tree in `at_nodes`, and how many of its nodes were verified.
        at_roots, at_nodes : int32 [t], int32 [n]
            The likeliest token after each root and node.
        lengths : int64 [t]
            The accepted nodes of each tree.
        shift : int
            SHIFT_ONE, SHIFT_HITS or SHIFT_LEVELS.

        Returns
        -------
        int32 [m, N], int64 [m]
            The n-grams of the columns of full windows, -1 behind the shorter ones, and the tree of
            each. Columns whose cells were not all verified have none.
        """
        return _iterate(
            numbers,
            roots,
            firsts,
            sizes,
            at_roots,
            at_nodes,
            lengths,
            shift,
            self.tokens,
            self.cells,
            self.shapes,
            self._seeds,
            self._draws,
        )


@kernel
def _draw(seeds: Int32s, draws: NDArray[np.uint64], number: int) -> np.int32:
    draws[number] = draws[number] * _MULTIPLIER + _INCREMENT
    at = np.int64(draws[number] >> np.uint64(33)) % seeds[number, 0]
    return seeds[number, 1 + at]


@kernel
def _restart(
    numbers: Int64s, tokens: Int32s, shapes: Int32s, seeds: Int32s, draws: NDArray[np.uint64]
) -> None:
    for number in numbers:
        shapes[number, _FILLED] = 1
        for column in range(1, shapes[number, _SIZE] + shapes[number, _NGRAM] - 2):
            tokens[number, 0, column] = _draw(seeds, draws, number)


@kernel
def _append_combs(
    old_tokens: Int32s,
    old_parents: Int32s,
    old_probs: NDArray[np.float32],
    old_depths: Int32s,
    old_sources: NDArray[np.uint8],
    old_firsts: Int64s,
    numbers: Int64s,
    max_nodes: Int64s,
    max_depths: Int64s,
    prob: np.float32,
    guesses: Int32s,
    cells: Int32s,
    shapes: Int32s,
) -> tuple[Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s]:
    most = len(old_tokens)
    for number in numbers:
        if number >= 0:
            most += shapes[number, _FILLED] * (guesses.shape[2])
    tokens, parents = np.empty(most, np.int32), np.empty(most, np.int32)
    depths, probs = np.empty(most, np.int32), np.empty(most, np.float32)
    sources = np.empty(most, np.uint8)
    firsts = np.zeros(len(old_firsts), np.int64)
    end = 0
    for tree, number in enumerate(numbers):
        first = end
        for old in range(old_firsts[tree], old_firsts[tree + 1]):
            tokens[end], parents[end] = old_tokens[old], old_parents[old]
            depths[end], probs[end], sources[end] = (
                old_depths[old],
                old_probs[old],
                old_sources[old],
            )
            end += 1
        if number >= 0:
            least = prob if end == first else min(prob, probs[end - 1])
            filled = shapes[number, _FILLED]
            columns = shapes[number, _SIZE] + shapes[number, _NGRAM] - 1 - filled
            cells[number] = ABSENT
            cells[number, 0, 0] = ROOT
            for level in range(filled):
                for column in range(columns):
                    if level == 0 and column == 0:
                        continue
                    above = (
                        cells[number, level - 1, column] if level else cells[number, 0, column - 1]
                    )
                    if above == ABSENT or level + column > max_depths[tree]:
                        continue
                    token = guesses[number, level, column]
                    here = ABSENT
                    for node in range(first + above + 1, end):
                        if parents[node] == above and tokens[node] == token:
                            here = node - first
                            break
                    if here == ABSENT:
                        if end - first == max_nodes[tree]:
                            continue
                        here = end - first
                        tokens[end], parents[end] = token, above
                        depths[end], probs[end], sources[end] = level + column, least, WINDOW
                        end += 1
                    cells[number, level, column] = here
        firsts[tree + 1] = end
    return (
        tokens[:end].copy(),
        parents[:end].copy(),
        probs[:end].copy(),
        depths[:end].copy(),
        sources[:end].copy(),
        firsts,
    )


@kernel
def _iterate(
    numbers: Int64s,
    roots: Int32s,
    firsts: Int64s,
    sizes: Int64s,
    at_roots: Int32s,
    at_nodes: Int32s,
    lengths: Int64s,
    shift: int,
    tokens: Int32s,
    cells: Int32s,
    shapes: Int32s,
    seeds: Int32s,
    draws: NDArray[np.uint64],
) -> tuple[Int32s, Int64s]:
    most = 0
    for number in numbers:
        most += shapes[number, _SIZE]
    ngrams = np.full((most, tokens.shape[1] + 1), -1, np.int32)
    owners = np.empty(most, np.int64)
    num_ngrams = 0
    for tree, number in enumerate(numbers):
        size, ngram = shapes[number, _SIZE], shapes[number, _NGRAM]
        filled = shapes[number, _FILLED]
        columns = size + ngram - 1 - filled
        window, last = tokens[number], cells[number, filled - 1]
        full = filled == ngram - 1
        window[0, 0] = roots[tree]
        said = np.empty(columns, np.int32)
        for column in range(columns):
            cell = last[column]
            if cell == ROOT:
                said[column] = at_roots[tree]
            elif 0 <= cell < sizes[tree]:
                said[column] = at_nodes[firsts[tree] + cell]
            else:  # it was not verified
                said[column] = _draw(seeds, draws, number)
                continue
            if full:
                ngrams[num_ngrams, : ngram - 1] = window[: ngram - 1, column]
                ngrams[num_ngrams, ngram - 1] = said[column]
                owners[num_ngrams] = tree
                num_ngrams += 1
        if full:
            _move_levels(window, said, columns, filled)
        else:
            # The text is a token longer, so what was filled moves on by a column.
            for level in range(filled):
                window[level, : columns - 1] = window[level, 1:columns].copy()
            window[filled, : columns - 1] = said[1:]
            filled, columns = filled + 1, columns - 1
            shapes[number, _FILLED] = filled
        if shift == SHIFT_ONE:
            continue
        for _ in range(min(lengths[tree], tokens.shape[2])):
            if shift == SHIFT_LEVELS and filled == ngram - 1:
                for column in range(columns):
                    said[column] = _draw(seeds, draws, number)
                _move_levels(window, said, columns, filled)
            else:
                for level in range(filled):
                    window[level, : columns - 1] = window[level, 1:columns].copy()
                    window[level, columns - 1] = _draw(seeds, draws, number)
    return ngrams[:num_ngrams], owners[:num_ngrams]


@kernel
def _move_levels(window: Int32s, said: Int32s, columns: int, levels: int) -> None:
    """The oldest level goes, `said` is the newest."""
    for level in range(levels - 1):
        window[level, :columns] = window[level + 1, :columns]
    window[levels - 1, :columns] = said[:columns]
