"""Tensor parallelism: rank 0 drafts, all ranks verify the same trees, and the output is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookahead_vllm.draft.cache import file as cache_file
from tests.support.driving import engine
from tests.support.ranks import check_lookahead, plain_answers
from tests.support.servers import cores_of

pytestmark = pytest.mark.usefixtures("runner")


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engine settings: two ranks with a process and a core each, and an empty cache folder."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores_of(2))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return {"tensor_parallel_size": 2}


def test_ranks_verify_the_same_trees(
    llama: Path, tmp_path: Path, two_ranks: dict[str, Any]
) -> None:
    with engine(llama, **two_ranks) as llm:
        plain = plain_answers(llm)
    cache = tmp_path / "learned.cache"
    lookahead = {"proposer": "hybrid", "budget": "auto", "cache_path": str(cache)}
    with engine(llama, lookahead, **two_ranks) as llm:
        check_lookahead(llm, plain)
    assert len(list(tmp_path.glob("lookahead_step_cost/*"))) == 1
    assert cache_file.read_header(cache).namespaces == 1
