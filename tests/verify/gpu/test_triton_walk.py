"""The walk in Triton equals the brute force; run by Triton's interpreter, compiled for GPUs."""

from __future__ import annotations

import os

import pytest

from tests.verify.gpu.test_triton_compiles import TOOLS, Launches, instructions_of, spills
from tests.verify.test_walk import check, poisoned, random_case

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in another process")
compiles = pytest.mark.skipif(
    IS_INTERPRETED or not (TOOLS / "ptxas").is_file(), reason="interpreted, or no ptxas"
)


@interpreted
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("most", "tokens"), [(0, 1), (4, 1), (9, 2), (20, 2), (70, 1)])
def test_the_deepest_matching_path_is_accepted(seed: int, most: int, tokens: int) -> None:
    from lookahead_vllm.verify.gpu.triton_walk import walk_rows

    case = random_case(seed, 4, most, tokens, padding=seed % 3)
    out = poisoned(len(case.ids), len(case.cu_num_logits) - 1, case.width)
    walk_rows(*case.tensors(wide=seed % 2 == 0), *out)
    check(case, out)


@interpreted
def test_many_rows_of_padding() -> None:
    from lookahead_vllm.verify.gpu.triton_walk import walk_rows

    case = random_case(1, 3, 5, 2, padding=40)
    out = poisoned(len(case.ids), len(case.cu_num_logits) - 1, case.width)
    walk_rows(*case.tensors(), *out)
    check(case, out)


@interpreted
def test_rows_behind_the_width_are_not_accepted() -> None:
    from lookahead_vllm.verify.gpu.triton_walk import walk_rows

    case = random_case(0, 1, 6, 1)._replace(parents=[0, 0, 1, 2, 3, 4, 5], ids=[0] * 7)
    case = case._replace(
        sampled=[0] * 7, cu_num_logits=[0, 7], logits_indices=list(range(7)), width=3
    )
    out = poisoned(7, 1, 3)
    walk_rows(*case.tensors(), *out)
    assert out.num_sampled.tolist() == [3]
    assert out.tokens.tolist() == [[0, 0, 0]]


@compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("most", [3, 100])
def test_the_walk_does_not_spill(
    capability: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookahead_vllm.verify.gpu import triton_walk

    walk = Launches(triton_walk._walk)
    monkeypatch.setattr(triton_walk, "_walk", walk)
    case = random_case(0, 3, most)
    triton_walk.walk_rows(*case.tensors(), *poisoned(len(case.ids), 3, case.width))
    assert not spills(instructions_of(walk.compile(capability)))
