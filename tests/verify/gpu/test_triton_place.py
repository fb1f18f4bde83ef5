"""The rows of a step in Triton equal those of the brute force; interpreted, compiled for GPUs."""

from __future__ import annotations

import os

import pytest
import torch

from tests.verify.gpu.test_triton_compiles import TOOLS, Launches, instructions_of, spills
from tests.verify.test_place import (
    arguments_of,
    check,
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
    from lookahead_vllm.verify.gpu.triton_place import place_rows

    case = random_case(seed, most, groups, most_requests=1 if most == 70 else 7)
    rows, lengths = stale_rows(groups), no_lengths()
    place_rows(*arguments_of(case, rows), lengths, case.table.addresses())
    check(case, rows, lengths)


@interpreted
def test_a_step_in_a_graph_without_trees_has_no_lengths_of_trees() -> None:
    from lookahead_vllm.verify.gpu.triton_place import place_rows

    case, rows = random_case(3), stale_rows(1)
    place_rows(*arguments_of(case, rows), None, case.table.addresses())
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
    triton_place.place_rows(
        *arguments_of(case, stale_rows(groups)), lengths, case.table.addresses()
    )
    assert not spills(instructions_of(launches.compile(capability)))
