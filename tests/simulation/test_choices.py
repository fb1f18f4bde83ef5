"""Recorded choices: the file, and what a replay makes of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.draft.tree import UNKNOWN, DraftTree
from lookahead_vllm.simulation.choices import load_choices, save_choices, with_choices
from lookahead_vllm.simulation.drafters import choose_drafters
from lookahead_vllm.simulation.replay import figures, play
from lookahead_vllm.simulation.traces import AnswerChoices, Trace, TraceError, TraceFile


def choices(answer: list[int], num_choices: int = 8) -> AnswerChoices:
    """The answer's tokens, likeliest, and behind each the next numbers of the vocabulary."""
    tokens = np.array(answer, np.int32)[:, None] + np.arange(num_choices, dtype=np.int32)
    return AnswerChoices(
        tokens, np.tile(np.arange(num_choices, dtype=np.float16), (len(answer), 1))
    )


def trace(output: list[int], id: str = "a", recorded: AnswerChoices | None = None) -> Trace:
    return Trace(np.array([1, 2], np.int32), np.array(output, np.int32), "s/c", id, recorded)


def save(path: Path, **answers: list[int]) -> Path:
    save_choices(path, list(answers), [choices(one) for one in answers.values()], "m", "float32")
    return path


def test_choices_are_stored_by_the_id_of_their_trace(tmp_path: Path) -> None:
    path = save(tmp_path / "t.choices.npz", a=[5, 6], b=[7, 8, 9])
    file = TraceFile(tmp_path / "t.jsonl", [trace([7, 8, 9], "b"), trace([5, 6], "a")], 0)
    other = save(tmp_path / "u.choices.npz", a=[1, 1], b=[1, 1, 1])
    found = with_choices(file, [other, path], 8)
    for one in found.traces:
        assert one.choices is not None
        expected = choices(one.output.tolist())
        assert one.choices.tokens.tolist() == expected.tokens.tolist()
        assert one.choices.gaps.tolist() == expected.gaps.tolist()
    with np.load(path) as stored:
        assert (str(stored["model"]), str(stored["dtype"])) == ("m", "float32")
        assert stored["firsts"].tolist() == [0, 2, 5]
        kinds = {name: (stored[name].dtype.name, stored[name].shape) for name in ("tokens", "gaps")}
        assert kinds == {"tokens": ("int32", (5, 8)), "gaps": ("float16", (5, 8))}


@pytest.mark.parametrize(
    ("answers", "name", "message"),
    [
        ({"a": [5, 6]}, "u", "no file is named t.choices.npz"),
        ({"b": [5, 6]}, "t", "has none of trace 'a'"),
        ({"a": [5, 6, 7]}, "t", "8 choices at 3 positions of trace 'a', where 8 at 2 are needed"),
    ],
)
def test_choices_of_other_traces_are_refused(
    answers: dict[str, list[int]], name: str, message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / f"{name}.choices.npz", **answers)
    with pytest.raises(TraceError, match=message):
        with_choices(TraceFile(tmp_path / "t.jsonl", [trace([5, 6])], 0), [path], 8)


def test_other_files_and_torn_ones_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "t.choices.npz", a=[5, 6], b=[7, 8, 9])
    whole = path.read_bytes()
    np.savez(tmp_path / "less.npz", ids=["a"])
    less = (tmp_path / "less.npz").read_bytes()
    for content in (b"no zip", less, *(whole[:size] for size in range(0, len(whole), 50))):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"was not written by scripts/record_choices\.py"):
            load_choices(path)


class Listener:
    """A drafter that proposes the given trees, one a step, and logs what it learns."""

    num_choices = 8

    def __init__(self, *trees: DraftTree) -> None:
        self.trees = list(trees)
        self.log: list[Any] = []

    def start(self, request_id: str, prompt: Any) -> None:
        pass

    def extend(self, request_id: str, tokens: list[int]) -> None:
        self.log.append(tokens)

    def observe(self, verified: Verified) -> None:
        self.log.append(verified)

    def propose(self, limit: Any, context: Any) -> DraftTree:
        return self.trees.pop(0) if self.trees else DraftTree.chain([])

    def tree(self, draft: DraftTree) -> DraftTree:
        return draft

    def finish(self, request_id: str) -> None:
        pass


def test_a_drafter_hears_the_choices_at_the_root_and_at_the_accepted_nodes() -> None:
    answer = [10, 20, 30, 40, 50]
    recorded = choices(answer)
    # The prefill emits 10. Of the first tree, 20 and 30 are right; nothing else is drafted.
    drafter = Listener(DraftTree.from_lists([99, 20, 98, 30], [-1, -1, 0, 1]))
    play(drafter, trace(answer, recorded=recorded), "r", budget=8)
    prefill, first, heard, last = drafter.log
    assert (prefill, first, last) == ([10], [20, 30, 40], [50])
    assert heard.request_ids == ["r"]
    assert heard.forest.tokens.tolist() == [99, 20, 98, 30]
    assert heard.forest.parents.tolist() == [-1, -1, 0, 1]
    assert heard.at_roots.tolist() == recorded.tokens[1:2].tolist()
    assert heard.at_nodes[[1, 3]].tolist() == recorded.tokens[2:4].tolist()
    assert (heard.at_nodes[[0, 2]] == UNKNOWN).all()
    assert heard.gaps[[0, 2, 4]].tolist() == recorded.gaps[1:4].tolist()
    assert heard.accepted.tolist() == [False, True, False, True]
    assert heard.lengths.tolist() == [2]


def test_a_step_without_a_draft_is_heard_too_and_a_deaf_drafter_hears_nothing() -> None:
    answer = [10, 20, 30, 40]
    one = trace(answer, recorded=choices(answer))
    drafter = Listener()
    play(drafter, one, "r", budget=8)
    heard = [entry for entry in drafter.log if isinstance(entry, Verified)]
    assert [entry.at_roots[0, 0] for entry in heard] == [20, 30]  # the last token has no draft
    drafter = Listener()
    drafter.num_choices = 0
    play(drafter, one, "r", budget=8)
    assert not any(isinstance(entry, Verified) for entry in drafter.log)
    drafter = Listener()
    play(drafter, trace(answer), "r", budget=8)
    assert not any(isinstance(entry, Verified) for entry in drafter.log)


def test_hybrid_drafts_runners_up_that_were_recorded() -> None:
    """After token i the model hesitates between two; the answers take the second every time."""
    rng = random.Random(0)
    plain, heard = [], []
    for number in range(30):
        # Every token is followed by another one in each answer, so texts alone do not help.
        answer = [1000]
        for _ in range(60):
            answer.append(1000 + (answer[-1] * 7 + rng.randrange(3) * 100) % 3000)
        tokens = np.zeros((len(answer), 8), np.int32)
        for j in range(1, len(answer)):
            followers = [1000 + (answer[j - 1] * 7 + k * 100) % 3000 for k in range(3)]
            tokens[j] = [*followers, *range(5)]
        gaps = np.tile(np.array([0, 0.1, 0.2, 8, 8, 8, 8, 8], np.float16), (len(answer), 1))
        plain.append(trace(answer, str(number)))
        heard.append(trace(answer, str(number), AnswerChoices(tokens, gaps)))
    edl = {}
    for name, traces in (("without", plain), ("with", heard)):
        drafter = choose_drafters("hybrid", has_choices=True)["hybrid"](8, None)
        edl[name] = figures([play(drafter, one, one.id, 8) for one in traces])["edl"]
    assert edl["with"] > edl["without"] + 0.1
