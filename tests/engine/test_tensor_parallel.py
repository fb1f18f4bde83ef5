"""Tensor parallelism: rank 0 drafts, all ranks verify the same trees, and the output is exact."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.proposer import NoProposer
from lookahead_vllm.engine.worker.v1 import runner as runner_module
from tests.support.driving import engine, generate, generate_staggered, random_prompts
from tests.support.kernels import Signatures, compiled
from tests.support.servers import cores_of

PROMPTS = random_prompts(6, 40, seed=31)
GREEDY = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
SEEDED = [
    SamplingParams(temperature=0.7, top_p=0.9, seed=i, max_tokens=60, detokenize=False)
    for i in range(len(PROMPTS))
]


def record_trees(worker: Any) -> None:
    """In a worker: record a digest of the trees of each step, and whether any branches."""
    runner = worker.model_runner
    original, runner.recorded_trees = runner._recall, []

    def recall(*args: Any) -> Any:
        scheduled = original(*args)
        forest = scheduled.forest
        if forest.num_nodes:
            arrays = (forest.tokens, forest.parents, forest.firsts, scheduled.rows)
            digest = hashlib.sha256(b"|".join(array.tobytes() for array in arrays)).hexdigest()
            runner.recorded_trees.append((digest, bool(forest.branching.any())))
        return scheduled

    runner._recall = recall


def set_clock(worker: Any) -> None:
    """In a worker: replace the clock. A node costs nothing on rank 0 and 10 ms on rank 1."""
    runner = worker.model_runner
    proposer, original, now = runner.drafter.proposer, runner._observe_step, 0.0
    assert isinstance(proposer, NoProposer) or proposer.cost is not None, "measured at start"
    if proposer.cost is not None:
        proposer.cost = StepCost(CostCurve([1, 1024], [0.010, 0.011]))

    def observe_step(*args: Any) -> None:
        nonlocal now
        nodes = runner._work.nodes if runner._work else 0
        now += 0.010 * (1 + worker.rank * nodes)
        original(*args)

    runner_module.time = SimpleNamespace(perf_counter=lambda: now)  # type: ignore[attr-defined]
    runner._observe_step = observe_step


def compiled_kernels(worker: Any) -> Signatures:
    """In a worker: the signatures that numba has compiled."""
    return compiled()


def verified(worker: Any) -> tuple[list[tuple[str, bool]], dict[str, int], bool]:
    """In a worker: the recorded trees, the counters, and whether this rank drafts."""
    runner = worker.model_runner
    drafter = runner.drafter
    return (
        runner.recorded_trees,
        vars(drafter.counters),
        not isinstance(drafter.proposer, NoProposer),
    )


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
    """The ranks' clocks differ, and `budget` "auto" depends on the clock."""
    with engine(llama, **two_ranks) as plain:
        greedy, seeded = generate(plain, PROMPTS, GREEDY), generate(plain, PROMPTS, SEEDED)
    cache = tmp_path / "learned.cache"
    lookahead = {"proposer": "hybrid", "budget": "auto", "cache_path": str(cache)}
    with engine(llama, lookahead, **two_ranks) as llm:
        llm.collective_rpc(record_trees)
        llm.collective_rpc(set_clock)
        compiled_at_start = llm.collective_rpc(compiled_kernels)
        assert generate_staggered(llm, PROMPTS, GREEDY) == greedy
        assert generate(llm, PROMPTS, GREEDY) == greedy
        assert generate(llm, PROMPTS, SEEDED) == seeded
        rank_0, rank_1 = llm.collective_rpc(verified)
        assert llm.collective_rpc(compiled_kernels) == compiled_at_start
    (trees, counters, drafts), (trees_1, counters_1, drafts_1) = rank_0, rank_1
    assert (drafts, drafts_1) == (True, False)
    assert trees == trees_1 and counters == counters_1
    assert sum(branching for _, branching in trees) > 20
    assert counters["moved_tokens"] > 20
    assert len(list(tmp_path.glob("lookahead_step_cost/*"))) == 1
    assert cache_file.read_header(cache).namespaces == 1
