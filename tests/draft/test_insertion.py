"""Long texts are inserted for a limited time a step, and requests take turns."""

import math

import numpy as np
import pytest

from lookahead_vllm.draft import insertion
from lookahead_vllm.draft.insertion import CHUNK_TOKENS, TURNS_LOCKED, InsertionQueue


class Clock:
    """A clock that advances by `inserting` seconds with each part of a text."""

    def __init__(self, inserting: float) -> None:
        self.now = 0.0
        self._inserting = inserting
        self.inserted: list[tuple[str, int]] = []

    def insert(self, name):
        def insert(tokens):
            self.now += self._inserting
            self.inserted.append((name, len(tokens)))

        return insert

    def __call__(self) -> float:
        return self.now


def queue_of(clock, seconds=1.0, share=0.1, **texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(insertion, "MAX_SECONDS", seconds)
        queue = InsertionQueue()
    queue.clock, queue.share = clock, share
    for name, length in texts.items():
        queue.add(name, clock.insert(name), np.zeros(length, np.int32))
    return queue


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize(("length", "turns"), [(1.0, 1), (4.9, 2), (7.9, 4), (100.0, 4)])
def test_a_step_inserts_for_its_share_and_one_turn_at_most(requests, length, turns):
    """The share is of at most one second; a turn takes 0.25 s."""
    clock = Clock(0.25)
    queue = queue_of(clock, **{f"r{i}": 131_072 for i in range(requests)})
    queue.end_step()
    for _ in range(40):
        clock.inserted.clear()
        end = clock.now + length
        queue.work()
        clock.now = end
        queue.end_step()
        assert {size for _, size in clock.inserted} == {CHUNK_TOKENS}
    assert len(clock.inserted) == turns


def test_each_step_has_a_turn_even_on_a_slow_machine():
    clock = Clock(100.0)
    queue = queue_of(clock, r=2 * CHUNK_TOKENS)
    queue.work()
    queue.work()
    queue.end_step()
    assert clock.inserted == [("r", CHUNK_TOKENS)]
    queue.end_step()
    assert clock.inserted == [("r", CHUNK_TOKENS)] * 2


def test_requests_take_turns():
    clock = Clock(0.0)
    queue = queue_of(clock, long=5 * CHUNK_TOKENS, short=10, other=CHUNK_TOKENS + 1)
    queue.work()
    assert [name for name, _ in clock.inserted] == [
        *("long", "short", "other"),
        *("long", "other"),
        *("long", "long", "long"),
    ]
    assert sum(length for _, length in clock.inserted) == 6 * CHUNK_TOKENS + 11


@pytest.mark.parametrize(("seconds", "turns"), [(-1.0, 0), (0.0, 0), (0.1, 1), (0.6, 2), (99.0, 5)])
def test_time_in_which_nothing_else_is_done_is_used_too(seconds, turns):
    """A turn takes 0.25 s, and none begins that would end too late, but for the first. This time is
    no part of the step's share."""
    clock = Clock(0.25)
    queue = queue_of(clock, r=5 * CHUNK_TOKENS)
    left = queue._left
    queue.work_for(seconds)
    assert len(clock.inserted) == turns
    assert queue._left == left


def test_other_threads_get_the_interpreter_between_turns(monkeypatch):
    pauses = list[int]()
    queue = queue_of(clock := Clock(0.0), r=3 * TURNS_LOCKED * CHUNK_TOKENS)
    monkeypatch.setattr(insertion, "sleep", lambda _: pauses.append(len(clock.inserted)))
    queue.work_for(1.0)
    assert pauses == [TURNS_LOCKED, 2 * TURNS_LOCKED, 3 * TURNS_LOCKED]


def test_the_texts_of_an_ended_request_are_dropped():
    clock = Clock(0.3)
    queue = queue_of(clock, r=10**6, s=10)
    queue.work()
    queue.drop("r")
    queue.drop("unknown")
    clock.inserted.clear()
    queue.seconds = math.inf
    queue.work()
    assert not clock.inserted
