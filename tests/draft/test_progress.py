"""The tokens of a step are counted as a request by itself would count them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.progress import (
    GONE,
    MAX_STOPS,
    EmittedTokens,
    Progress,
    WantedDrafts,
    count_tokens,
    limit_trees,
)

MAX_MODEL_LEN = 60


class Request:
    """The reference, token by token."""

    def __init__(self, num_tokens: int, repeated: int, remaining: int, stops: list[int]) -> None:
        self.num_tokens, self.repeated, self.remaining = num_tokens, repeated, remaining
        self.stops = stops

    def emit(self, tokens: list[int]) -> list[int]:
        """The tokens that belong to the answer and are new."""
        new = []
        for token in tokens:
            self.num_tokens += 1
            if self.repeated:
                self.repeated -= 1
            elif self.remaining:
                new.append(token)
                self.remaining = 0 if token in self.stops else self.remaining - 1
        return new

    def limits(self, most: int) -> tuple[int, int]:
        """The most nodes and levels of its next tree."""
        nodes = min(most, MAX_MODEL_LEN - self.num_tokens - 1)
        depth = min(nodes, self.remaining - 1)
        return (nodes, depth) if depth > 0 and not self.repeated else (0, 0)


requests = st.builds(
    Request,
    st.integers(1, 50),
    st.integers(0, 3),
    st.integers(1, 9),
    st.lists(st.integers(0, 5), max_size=6),
)
emissions = st.lists(st.integers(0, 7), max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(requests, st.lists(emissions, min_size=2, max_size=2)), max_size=6))
def test_tokens_are_counted_up_to_the_end_of_the_answer(cases):
    progress = Progress()
    rows = []
    for i, (request, _) in enumerate(cases):
        rows.append(progress.add(str(i), request.num_tokens))
        progress.arrays.num_repeated[rows[-1]] = request.repeated
        progress.follow(rows[-1], 10 + i, request.remaining, [None, *request.stops])
    for step in range(2):
        bursts = [steps[step] for _, steps in cases]
        tokens = np.full((len(cases), 5), 99, np.int64)
        for i, burst in enumerate(bursts):
            tokens[i, : len(burst)] = burst
        counts = np.array([len(burst) for burst in bursts], np.int32)
        emitted = EmittedTokens(np.array(rows, np.int64), tokens, counts)
        spans = emitted.new_spans()
        for _ in range(2):  # the second call counts nothing
            count_tokens(progress.arrays[:], emitted[:], spans)
        ends = zip(bursts, spans.tolist(), strict=True)
        found = [burst[first:end] for burst, (first, end) in ends]
        assert found == [
            request.emit(burst) for (request, _), burst in zip(cases, bursts, strict=True)
        ]
        most = np.arange(len(cases)) * 3
        wanted = WantedDrafts(np.array(rows, np.int64), most, most % 2 == 0)
        trees = limit_trees(progress.arrays[:], wanted[:], MAX_MODEL_LEN).tolist()
        for i, (request, _) in enumerate(cases):
            nodes, depth = request.limits(3 * i)
            assert trees[i] == ([10 + i, nodes, depth, i % 2 == 0] if nodes else [0, 0, 0, 0])
        arrays = progress.arrays
        assert arrays.num_tokens[rows].tolist() == [request.num_tokens for request, _ in cases]
        assert arrays.is_decoding[rows].tolist() == [any(steps[: step + 1]) for _, steps in cases]


def test_requests_that_ended_or_get_no_drafts_are_left_out():
    progress = Progress()
    without = progress.add("without", 4)
    rows = np.array([GONE, without], np.int64)
    emitted = EmittedTokens(rows, np.ones((2, 1), np.int64), np.ones(2, np.int32))
    before = [array.copy() for array in progress.arrays]
    spans = emitted.new_spans()
    count_tokens(progress.arrays[:], emitted[:], spans)
    assert spans.tolist() == [[0, 0], [0, 0]]
    assert progress.arrays.num_tokens[without] == 5
    progress.arrays.num_tokens[without] -= 1
    progress.arrays.is_decoding[without] = False
    assert all(map(np.array_equal, progress.arrays, before))
    wanted = WantedDrafts(rows[1:], np.array([8]), np.array([True]))
    assert limit_trees(progress.arrays[:], wanted[:], 100).tolist() == [[0, 0, 0, 0]]


def test_a_row_that_is_used_again_starts_anew():
    progress = Progress()
    rows = [progress.add(str(i), 5) for i in range(70)]  # more than there is room for at first
    assert len(set(rows)) == 70
    progress.follow(rows[0], 3, 9, range(10))
    progress.arrays.num_repeated[rows[0]] = 2
    progress.pop("0")
    again = progress.add("new", 7)
    assert again == rows[0]
    arrays = progress.arrays
    assert (arrays.num_tokens[again], arrays.remaining[again], arrays.num_repeated[again]) == (
        7,
        0,
        0,
    )
    progress.follow(again, 4, 9, [1])
    assert arrays.stops[again].tolist() == [1] + [-1] * (MAX_STOPS - 1)


def test_a_request_with_many_stop_tokens_makes_no_step_longer():
    progress = Progress()
    row, size = progress.add("r", 5), progress.arrays.stops.nbytes
    progress.follow(row, 0, 9, [None, *range(100_000)])
    assert progress.arrays.stops.nbytes == size
    assert progress.arrays.stops[row].tolist() == [*range(MAX_STOPS)]
