"""Long texts are inserted for a fixed time a step, and every request has its turn."""

import math

import numpy as np
import pytest

from lookahead_vllm.draft import insertion
from lookahead_vllm.draft.insertion import CHUNK, InsertionQueue


class Clock:
    """Time goes on by `inserting` seconds with each piece of text."""

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
        patch.setattr(insertion, "SECONDS", seconds)
        queue = InsertionQueue()
    queue.clock, queue.share = clock, share
    for name, length in texts.items():
        queue.add(name, clock.insert(name), np.zeros(length, np.int32))
    return queue


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize(("length", "turns"), [(1.0, 1), (4.9, 2), (7.9, 4), (100.0, 4)])
def test_a_step_inserts_for_its_share_and_one_turn_at_most(requests, length, turns):
    """Of a second at most; a turn takes 0.25 s here."""
    clock = Clock(0.25)
    queue = queue_of(clock, **{f"r{i}": 131_072 for i in range(requests)})
    queue.end_step()
    for _ in range(40):
        clock.inserted.clear()
        end = clock.now + length
        queue.work()
        clock.now = end
        queue.end_step()
        assert {size for _, size in clock.inserted} == {CHUNK}
    assert len(clock.inserted) == turns


def test_however_slow_the_machine_each_step_has_a_turn():
    clock = Clock(100.0)
    queue = queue_of(clock, r=2 * CHUNK)
    queue.work()
    queue.work()
    queue.end_step()
    assert clock.inserted == [("r", CHUNK)]
    queue.end_step()
    assert clock.inserted == [("r", CHUNK)] * 2


def test_requests_take_turns():
    clock = Clock(0.0)
    queue = queue_of(clock, long=5 * CHUNK, short=10, other=CHUNK + 1)
    queue.work()
    assert [name for name, _ in clock.inserted] == [
        *("long", "short", "other"),
        *("long", "other"),
        *("long", "long", "long"),
    ]
    assert sum(length for _, length in clock.inserted) == 6 * CHUNK + 11


def test_texts_of_one_request_keep_their_order():
    clock = Clock(0.0)
    queue = queue_of(clock, r=CHUNK + 1)
    queue.add("r", clock.insert("then"), np.zeros(3, np.int32))
    queue.add("r", clock.insert("empty"), np.zeros(0, np.int32))
    queue.work()
    assert clock.inserted == [("r", CHUNK), ("r", 1), ("then", 3)]


def test_what_an_ended_request_had_waiting_is_dropped():
    clock = Clock(0.3)
    queue = queue_of(clock, r=10**6, s=10)
    queue.work()
    queue.drop("r")
    queue.drop("unknown")
    clock.inserted.clear()
    queue.seconds = math.inf
    queue.work()
    assert not clock.inserted


def test_pieces_add_up_to_the_text():
    queue, pieces = InsertionQueue(), []
    queue.seconds = math.inf
    text = np.arange(3 * CHUNK + 5, dtype=np.int32)
    queue.add("r", pieces.append, text)
    queue.work()
    np.testing.assert_array_equal(np.concatenate(pieces), text)
