"""The rows of a step in Triton equal those of the brute force; interpreted, compiled for GPUs."""

from __future__ import annotations

import os

import pytest
import torch

from tests.verify.gpu.test_triton_compiles import TOOLS, Launches, instructions_of, spills
from tests.verify.test_place import (
    arguments_of,
    check,
    check_rows_of_no_split,
    expected,
    no_lengths,
    random_case,
    stale_rows,
)

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in another process")
compiles = pytest.mark.skipif(
    IS_INTERPRETED or not (TOOLS / "ptxas").is_file(), reason="interpreted, or no ptxas"
)


@interpreted
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("most", "groups"), [(0, 1), (9, 1), (9, 3), (70, 2)])
def test_every_row_is_where_its_request_is(seed: int, most: int, groups: int) -> None:
    from lookahead_vllm.verify.gpu.triton_place import TritonPlacer

    case = random_case(seed, most, groups, most_requests=1 if most == 70 else 7)
    rows, lengths = stale_rows(groups), no_lengths()
    TritonPlacer(case.table, rows).place(*arguments_of(case), lengths)
    check(case, rows, lengths)


@interpreted
def test_rows_that_were_written_in_another_way_are_left_alone() -> None:
    from lookahead_vllm.verify.gpu.triton_place import TritonPlacer

    check_rows_of_no_split(TritonPlacer)


@interpreted
def test_a_step_in_a_graph_without_trees_has_no_lengths_of_trees() -> None:
    from lookahead_vllm.verify.gpu.triton_place import TritonPlacer

    case, rows = random_case(3), stale_rows(1)
    TritonPlacer(case.table, rows).place(*arguments_of(case))
    check(case, rows, expected(case)[1])


@compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_placement_does_not_spill(
    capability: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookahead_vllm.verify.gpu import triton_place

    launches = Launches(triton_place._place)
    monkeypatch.setattr(triton_place, "_place", launches)
    case = random_case(0, groups=groups)
    lengths = torch.zeros(7, dtype=torch.int32)
    writer = triton_place.TritonPlacer(case.table, stale_rows(groups))
    writer.place(*arguments_of(case), lengths)
    assert not spills(instructions_of(launches.compile(capability)))
