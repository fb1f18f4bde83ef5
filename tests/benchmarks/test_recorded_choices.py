"""Recorded choices stand in for what a guided model would say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engines.recorded_choices import Choices, RecordedChoices
from benchmarks.engines.target_guided import Guide, Nodes, parents_of
from lookahead_vllm.draft.tree import DraftForest, DraftTree

PROMPTS = [[1, 10, 11], [1, 10, 12]]
ANSWERS = [[20, 21, 22], [20, 21, 30]]


def trace(*rows: list[int]) -> Choices:
    gaps = np.tile(np.array([0, 0.5, 2], np.float32), (len(rows), 1))
    return Choices(np.array(rows, np.int32), gaps)


TRACES = [
    trace([20, 40, 41], [21, 42, 43], [44, 45, 22]),
    trace([20, 1, 2], [3, 21, 4], [30, 5, 6]),
]


def recorded() -> RecordedChoices:
    return RecordedChoices(PROMPTS, ANSWERS, TRACES)


def first(choices: Choices | None) -> int | None:
    return None if choices is None else int(choices.tokens[0])


def test_a_token_of_the_text_has_the_choices_recorded_there() -> None:
    assert [first(recorded().at(0, position)) for position in range(2, 7)] == [
        None, 20, 21, 44, None,
    ]  # fmt: skip


def test_elsewhere_the_choices_are_those_after_the_same_tokens_of_another_text() -> None:
    choices = recorded()
    assert first(choices.after(0, 20, 21)) == 30  # both texts have it; the own one is not taken
    assert first(choices.after(1, 20, 21)) == 44
    assert first(choices.after(0, 99, 21)) == 30  # only the last token is the same
    assert first(choices.after(1, 99, 11)) == 20  # the last token of a prompt
    assert first(choices.after(0, 99, 11)) is None  # no other text has it
    assert first(choices.after(0, 20, 99)) is None


def test_rows_have_the_parents_of_their_trees_or_of_chains() -> None:
    assert parents_of([1, 3, 2], None) == [-1, -1, 1, 2, -1, 4]
    tree = DraftTree.from_lists([5, 6, 7, 8], [-1, -1, 0, 1])
    forest = DraftForest.of([tree])
    step: Any = SimpleNamespace(forest=forest, rows=np.array([1]))
    assert parents_of([2, 5, 2], step) == [-1, 0, -1, 2, 2, 3, 4, -1, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_recorded_token_is_the_largest_and_the_others_keep_their_gaps(
    dtype: torch.dtype,
) -> None:
    guide = Guide(PROMPTS, ANSWERS, torch.device("cpu"), recorded())
    guide.add_request("a", PROMPTS[0])
    guide.add_request("other", [7])
    # The tree of "a": its root, 20 (right), below it 21 (right) and 99; 98 and below it 21, which
    # the text has at this place, but not after 98.
    nodes = Nodes(
        tokens=[11, 20, 21, 99, 98, 21, 7],
        positions=[2, 3, 4, 4, 3, 4, 0],
        parents=[-1, 0, 1, 1, 0, 4, -1],
    )
    own = torch.linspace(-30, 30, 128).repeat(7, 1).to(dtype)
    logits = own.clone()
    guide.choose(logits, ["a", "other"], [6, 1], nodes)
    assert logits.argmax(1).tolist() == [20, 21, 22, 127, 127, 30, 127]
    top = logits.float().topk(4).values
    assert top[0, :3].tolist() == [0, -0.5, -2] and top[0, 3] < -9000
    # The recorded token was the third: it comes first, and the likeliest one right after it.
    assert top[2, :3].tolist() == [0, -0.0625, -0.5]
    assert logits[2].float().topk(3).indices.tolist() == [22, 44, 45]
    assert torch.equal(logits[[3, 4, 6]], own[[3, 4, 6]])  # nothing was recorded for them
