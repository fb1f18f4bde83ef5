"""Tensor parallelism: rank 0 drafts, all ranks verify the same trees, and the output is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookahead_vllm.draft.cache import file as cache_file
from tests.support.driving import engine
from tests.support.ranks import Answers, check_lookahead

pytestmark = pytest.mark.usefixtures("runner")


def test_ranks_verify_the_same_trees(
    llama: Path, tmp_path: Path, two_ranks: dict[str, Any], plain_of_two_ranks: Answers
) -> None:
    cache = tmp_path / "learned.cache"
    lookahead = {"proposer": "hybrid", "budget": "auto", "cache_path": str(cache)}
    with engine(llama, lookahead, **two_ranks) as llm:
        check_lookahead(llm, plain_of_two_ranks)
    assert len(list(tmp_path.glob("lookahead_step_cost/*"))) == 1
    assert cache_file.read_header(cache).namespaces == 1
