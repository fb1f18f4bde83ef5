"""The walk on the device accepts the deepest path that follows the sampled tokens."""

from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.verify.layout.node_layout import width_of
from lookahead_vllm.verify.walk import Walk, empty_walk, walk
from tests.verify.conftest import IS_INTERPRETED


class Case(NamedTuple):
    """The arguments of `walk`, all lists of Python integers."""

    ids: list[int]
    sampled: list[int]
    parents: list[int]
    cu_num_logits: list[int]
    logits_indices: list[int]
    width: int

    def tensors(self, wide: bool = False) -> list[Any]:
        """With `wide`, every tensor that may be int32 or int64 is int64, else int32."""
        either = torch.int64 if wide else torch.int32
        dtypes = (either, torch.int64, torch.int32, torch.int32, either)
        return [
            *(torch.tensor(part, dtype=d) for part, d in zip(self[:5], dtypes, strict=True)),
            self.width,
        ]


def random_case(
    seed: int, num_requests: int = 5, most: int = 9, tokens: int = 3, padding: int = 0
) -> Case:
    """Trees over few tokens, so that twins are frequent; each request has tokens before its root.

    With `padding`, there are requests without rows, and rows of no request, behind the others.
    """
    rng = np.random.default_rng(seed)
    parents: list[int] = []
    indices: list[int] = []
    firsts = [0]
    before = 0
    for _ in range(num_requests):
        first, size = firsts[-1], int(rng.integers(0, most + 1))
        parents.append(first)
        depth_first = rng.random() < 0.5  # half of the trees are deep
        for node in range(1, size + 1):
            low = max(0, node - 2) if depth_first else 0
            parents.append(first + int(rng.integers(low, node)))
        before += int(rng.integers(0, 3))
        indices.extend(range(before, before + size + 1))
        before += size + 1
        firsts.append(first + size + 1)
    rows = len(parents) + padding
    return Case(
        ids=rng.integers(0, tokens, rows).tolist(),
        sampled=rng.integers(0, tokens, rows).tolist(),
        parents=parents + [0] * padding,
        cu_num_logits=firsts + [firsts[-1]] * padding,
        logits_indices=indices + [0] * padding,
        width=most + 1,
    )


def brute_force(case: Case) -> list[list[int]]:
    """The rows of each request's path: of all paths that match, the longest, then the first."""
    paths = []
    for first, end in pairwise(case.cu_num_logits):
        matching = []
        for row in range(first, end):
            path = [row]
            while path[0] != first:
                path.insert(0, case.parents[path[0]])
            steps = pairwise(path)
            if all(case.ids[below] == case.sampled[above] for above, below in steps):
                matching.append(path)
        paths.append(max(matching, key=len, default=[]))
    return paths


def check(case: Case, result: Walk) -> None:
    """Every part of the result is what the paths of the brute force give."""
    tokens, num_sampled, order, origins, targets = (part.tolist() for part in result)
    expected_order = list(range(len(case.ids)))
    for request, path in enumerate(brute_force(case)):
        first = case.cu_num_logits[request]
        emitted = [case.sampled[row] for row in path]
        assert num_sampled[request] == len(path)
        assert tokens[request] == emitted + [0] * (case.width - len(path))
        expected_order[first : first + len(path)] = path
        root = case.logits_indices[first] if path else 0
        moves = [(root, root)] * case.width
        for depth, row in enumerate(path):
            if case.logits_indices[row] != root + depth:
                moves[depth] = (case.logits_indices[row], root + depth)
        assert list(zip(origins[request], targets[request], strict=True)) == moves
    assert order == expected_order


def poisoned(
    num_rows: int, num_requests: int, width: int, device: torch.device | str = "cpu"
) -> Walk:
    """`empty_walk`, whose memory holds the leftovers of another step."""
    buffers = empty_walk(num_rows, num_requests, width, device)
    for buffer in buffers:
        buffer.fill_(-77)
    return buffers


@pytest.mark.interpreted("too")
@settings(deadline=None, max_examples=20 if IS_INTERPRETED else 200)  # the first one compiles
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 6),
    most=st.integers(0, 12),
    tokens=st.integers(1, 3),
    padding=st.integers(0, 3),
    wide=st.booleans(),
)
def test_the_deepest_matching_path_is_accepted(seed, num_requests, most, tokens, padding, wide):
    case = random_case(seed, num_requests, most, tokens, padding)
    with mock.patch("lookahead_vllm.verify.walk.empty_walk", poisoned):
        check(case, walk(*case.tensors(wide)))


@pytest.mark.interpreted
def test_rows_beyond_the_width_are_never_accepted():
    case = random_case(0, num_requests=1, most=0)._replace(
        parents=[0, 0, 1, 2, 3, 4, 5], ids=[0] * 7
    )
    case = case._replace(
        sampled=[0] * 7, cu_num_logits=[0, 7], logits_indices=list(range(7)), width=3
    )
    result = walk(*case.tensors())
    assert result.num_sampled.tolist() == [3]
    assert result.tokens.tolist() == [[0, 0, 0]]


def test_a_walk_on_a_device_only_launches(monkeypatch):
    """Meta tensors have no data: whatever read some, or made a shape of it, would raise. So a CUDA
    graph can contain the call, and the launch is the same for all data."""
    pytest.importorskip("triton")
    from lookahead_vllm.verify.walk import compile_walk
    from tests.support.triton_launches import record_launches

    launches = record_launches(monkeypatch)["_walk"].calls
    arguments = [*(part.to("meta") for part in random_case(3).tensors()[:5]), 10]
    result = walk(*arguments)
    (launch,) = launches
    assert {part.device.type for part in result} == {"meta"}
    assert launch["grid"] == (6,)
    assert all(launch[name] is own for name, own in result._asdict().items())
    launches.clear()
    compile_walk(70, "meta")
    assert {launch["BLOCK"] for launch in launches} == {16, 32, 64, 128}


def test_a_width_holds_the_largest_tree_and_is_no_multiple_of_16():
    for nodes in range(130):
        width = width_of(DraftForest.of([DraftTree.chain([0] * nodes), DraftTree.chain([1])]))
        assert max(nodes, 1) + 1 <= width <= max(nodes, 1) + 2 and width % 16
