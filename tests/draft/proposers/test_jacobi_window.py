"""`jacobi_window` moves its window as the paper does, and its requests share nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from lookahead_vllm.draft.proposers.jacobi_window import JacobiWindowProposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.sources import RECYCLED, WINDOW
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.draft.window.branch import LookaheadBranch
from lookahead_vllm.options.server import LookaheadOptions
from lookahead_vllm.options.window import WindowShape
from tests.support.drafting import answer, draft, paths

Model = Callable[[list[int]], int]
"""The next token of a text."""

VOCAB = 40


class RandomTokens:
    """The pseudo-random tokens of a prompt with which windows are filled."""

    def __init__(self, prompt: list[int]) -> None:
        n = min(64, len(prompt))
        self.seeds = [prompt[int(i * (len(prompt) - 1) / max(n - 1, 1))] for i in range(n)]
        self.state = 1

    def __call__(self) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.seeds[(self.state >> 33) % len(self.seeds)]


class PaperWindow:
    """The window of one request: Fu et al., ICML 2024, Algorithm 2, lookahead branch.

    The model is run on a separate text for every cell, without masks.
    """

    def __init__(self, prompt: list[int], window_size: int, ngram_size: int) -> None:
        self._num_levels = ngram_size - 1
        self._draw = RandomTokens(prompt)
        self.levels = [[-1] + [self._draw() for _ in range(window_size + ngram_size - 3)]]

    def iterate(self, text: list[int], model: Model, max_depth: int) -> None:
        """One step after this text; cells that are deeper than `max_depth` are not verified."""
        last = len(self.levels) - 1
        new = []
        for column in range(len(self.levels[0])):
            path = [*self.levels[0][1 : column + 1], *(own[column] for own in self.levels[1:])]
            new.append(model(text + path) if last + column <= max_depth else self._draw())
        if len(self.levels) == self._num_levels:
            self.levels = [*self.levels[1:], new]
        else:
            self.levels = [level[1:] for level in self.levels] + [new[1:]]


def model_of(seed: int) -> Model:
    """A model that looks at the last two tokens."""
    table = np.random.default_rng(seed).integers(0, VOCAB, (VOCAB, VOCAB))
    return lambda text: int(table[text[-2], text[-1]])


def step(
    proposer: JacobiWindowProposer, name: str, text: list[int], model: Model, max_depth: int
) -> DraftTree:
    """One step of a request; appends what it emits to its text."""
    (tree,) = forest = draft_trees(proposer, [DraftLimits(name, 128, max_depth)])
    verified = Verified.nothing([name], forest, proposer.num_choices)
    at_nodes = [model(text + path) for path in paths(tree)]
    others = np.arange(proposer.num_choices)
    best = np.array([model(text), *at_nodes], np.int32)
    verified.tokens[:] = (best[:, None] + others) % VOCAB
    verified.gaps[:] = others
    emitted, verified.accepted[:] = answer(tree, model(text), at_nodes)
    read(proposer, {name: emitted}, verified)
    text += emitted
    return tree


def make(window_size: int, ngram_size: int) -> JacobiWindowProposer:
    proposer = JacobiWindowProposer(
        LookaheadOptions(
            proposer="jacobi_window",
            window_size=window_size,
            num_speculative_tokens=128,
            budget=128,
        )
    )
    proposer.branch = LookaheadBranch(WindowShape(window_size, ngram_size))
    return proposer


@pytest.mark.parametrize("shape", [(5, 4), (7, 2), (1, 5), (4, 3)])
@pytest.mark.parametrize("max_depth", [64, 5])
def test_every_step_moves_the_window_as_the_papers_algorithm(
    shape: tuple[int, int], max_depth: int
) -> None:
    proposer, model = make(*shape), model_of(1)
    prompt = list(range(3, 30))
    window = PaperWindow(prompt, *shape)
    proposer.start("r", prompt)
    text = [*prompt, model(prompt)]
    read(proposer, {"r": text[-1:]})
    (row,) = proposer.branch.windows.request_rows.rows_of(["r"])
    for _ in range(30):
        before = list(text)
        step(proposer, "r", text, model, max_depth)
        window.iterate(before, model, max_depth)
        levels, columns = len(window.levels), len(window.levels[0])
        assert proposer.branch.windows.arrays.filled[row] == levels
        found = proposer.branch.windows.arrays.tokens[row, :levels, :columns].tolist()
        assert found[0][1:] == window.levels[0][1:] and found[1:] == window.levels[1:]
    assert len(text) - len(prompt) > 45


def test_requests_share_nothing():
    """A request with the text of another one drafts what it would draft without it."""
    alone, shared = make(5, 4), make(5, 4)
    model, prompt = model_of(2), list(range(3, 30))
    shared.start("before", prompt, "tenant", [list(range(20))])
    text = list(prompt)
    num_guesses = 0
    for _ in range(60):
        tree = step(shared, "before", text, model, 64)
        num_guesses += int(np.isin(tree.sources, (RECYCLED, WINDOW)).sum())
    assert num_guesses > 1000
    for proposer in (alone, shared):
        proposer.start("r", prompt, "tenant")
    trees = [draft(proposer, max_nodes=128) for proposer in (alone, shared)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert set(trees[1].sources.tolist()) == {WINDOW}


def test_no_trie_is_kept():
    proposer = make(5, 4)
    proposer.start("r", list(range(3, 30)))
    read(proposer, {"r": list(range(30))})
    assert not proposer.trie.edges.any()
