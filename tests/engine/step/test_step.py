"""A step from the scheduler's output until its tokens are counted."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from lookahead_vllm.draft.budget.cost import StepWork
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.engine.step.drafts import Drafts
from lookahead_vllm.engine.step.step import State, Step


def scheduled(slots: dict[str, int]) -> SchedulerOutput:
    """A step that decodes requests with so many slots."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {req_id: 1 + count for req_id, count in slots.items()}
    output.total_num_scheduled_tokens = len(slots) + sum(slots.values())
    output.scheduled_spec_decode_tokens = {i: [-1] * count for i, count in slots.items() if count}
    return output


def test_the_page_of_a_step_lists_its_fields_in_order():
    page = Path(__file__).parents[3] / "docs/design.md"
    table = re.search(r"\| adds to `Step` \|\n.*?\n\n", page.read_text(), re.S)
    assert table
    stations = [row.split("|")[4] for row in table[0].strip().splitlines()[2:]]
    listed = re.findall(r"`(\w+)`", " ".join(stations))
    assert listed == [field.name for field in fields(Step)]


def test_vllm_prepares_no_more_slots_than_there_may_be_nodes():
    step = Step(scheduled({"a": 4, "b": 0, "c": 3}))
    assert step.has_slots and step.num_slots == 7 and not step.is_prepared_early
    step.prepare_early(5)
    assert step.state is State.PREPARED
    assert step.shaped.num_scheduled_tokens == {"a": 5, "b": 1, "c": 2}
    assert step.shaped.scheduled_spec_decode_tokens == {"a": [-1] * 4, "c": [-1]}
    assert step.scheduled.num_scheduled_tokens == {"a": 5, "b": 1, "c": 4}


def test_a_step_with_a_prompt_is_prepared_for_a_number_of_nodes_of_each_request():
    given = scheduled({"a": 4, "b": 0, "c": 2})
    given.num_scheduled_tokens["b"] = 50  # of its prompt
    step = Step(given)
    step.size(Step(SchedulerOutput.make_empty()), 3)
    assert step.awaits_drafts and not step.is_prepared_early
    assert step.offered.num_scheduled_tokens == {"a": 4, "b": 50, "c": 3}
    assert step.offered.total_num_scheduled_tokens == 57
    assert step.offered.scheduled_spec_decode_tokens == {"a": [-1] * 3, "c": [-1] * 2}
    assert given.num_scheduled_tokens == {"a": 5, "b": 50, "c": 3}


def test_a_request_gets_as_many_nodes_as_its_last_tree_and_the_mean_suggest():
    def sized(sizes: dict[str, int], room: dict[str, int]) -> list[int]:
        last, step = Step(scheduled(room)), Step(scheduled(dict.fromkeys("abcd", 64)))
        forest = DraftForest.of([DraftTree.chain([7] * size) for size in sizes.values()])
        last.whole = Drafts([*sizes], forest, np.zeros(len(sizes), np.int64))
        step.size(last)
        return [len(own) for own in step.offered.scheduled_spec_decode_tokens.values()]

    assert sized({}, {}) == [1, 1, 1, 1]
    assert sized({"a": 12, "b": 4, "c": 0, "e": 9}, dict.fromkeys("abce", 64)) == [8, 4, 2, 2]
    assert sized({"a": 1}, {"a": 1}) == [2, 1, 1, 1]  # it was full
    assert sized({"a": 40}, {"a": 40}) == [50, 10, 10, 10]


@pytest.mark.parametrize(
    ("slots", "repeats"),
    [({"a": 4, "b": 2}, True), ({"b": 2, "a": 4}, False), ({"a": 4, "b": 3}, False)],
)
def test_a_step_of_the_same_batch_takes_over_what_was_prepared(slots, repeats):
    last, step = Step(scheduled({"a": 4, "b": 2})), Step(scheduled(slots))
    last.prepare_early(5)
    last.found = last.prepared = object()
    assert step.repeat(last) is step.repeats is step.is_prepared_early is repeats
    if repeats:
        assert (step.found, step.most_nodes) == (last.found, 5) and step.may_repeat
    last.may_repeat = False
    assert not Step(scheduled(slots)).repeat(last)


@pytest.mark.parametrize(
    ("rows", "has_prefill", "is_known"), [(1, False, True), (5, False, False), (1, True, False)]
)
def test_a_step_that_reads_a_prompt_has_no_known_work(rows, has_prefill, is_known):
    runner: Any = object.__new__(LookaheadRunner)
    runner._late = SimpleNamespace(contexts=lambda step: np.array([50]))
    step = Step(SchedulerOutput.make_empty())
    step.batch = SimpleNamespace(num_reqs=1, num_tokens=rows, has_prefill=has_prefill)
    runner._measure(step)
    assert step.work == (StepWork(1, 0, 50, 50, 0) if is_known else None)
