"""vLLM's warm-up of its second runner: its own requests get drafts, and nothing is learned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu.warmup import warmup_kernels

from lookahead_vllm.engine.worker.v2.late_drafts import LateDrafts
from lookahead_vllm.engine.worker.v2.warm_up import WarmUpDrafts
from tests.support import v2_on_cpu
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    random_prompts,
    runner_of,
    worker_of,
)


def test_it_has_all_that_the_runner_calls() -> None:
    assert not {name for name in vars(LateDrafts) if not name.startswith("_")} - set(
        vars(WarmUpDrafts)
    )


@pytest.mark.parametrize(("max_nodes", "largest_step"), [(2000, 6 * 8), (20, 6 * 3)])
def test_vllms_warm_up_runs_a_step_of_the_most_nodes(
    max_nodes: int, largest_step: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[int] = []
    original = WarmUpDrafts.grow

    def grow(self: WarmUpDrafts, *args: Any) -> Any:
        drafts = original(self, *args)
        grown.append(drafts.forest.num_nodes)
        return drafts

    monkeypatch.setattr(WarmUpDrafts, "grow", grow)
    prompts = random_prompts(4, 20)
    with v2_on_cpu.enabled():
        with engine(llama) as plain:
            vanilla = generate(plain, prompts)
        with engine(
            llama, {"num_speculative_tokens": 8, "budget": 8}, max_num_batched_tokens=64
        ) as llm:
            runner, worker = runner_of(llm), worker_of(llm)
            drafter_of(llm).max_step_nodes = max_nodes
            with runner.warming_up():
                warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
            assert max(grown) == largest_step
            assert not drafter_of(llm).counters.trees
            assert generate(llm, prompts) == vanilla


@pytest.mark.parametrize("may_branch", [True, False])
def test_warming_up_fills_every_slot(may_branch: bool) -> None:
    drafts = WarmUpDrafts(may_branch, 100)
    cached = SimpleNamespace(req_ids=["a", "b", "c"], num_computed_tokens=[6, 9, 4])
    scheduled: Any = SimpleNamespace(
        scheduled_spec_decode_tokens={"b": [0] * 4, "c": [0], "new": [0]},
        scheduled_cached_reqs=cached,
    )
    found = drafts.grow(scheduled)
    assert found.req_ids == ["b", "c"] and found.num_tokens.tolist() == [10, 5]
    assert found.forest.sizes.tolist() == [4, 1]
    assert found.forest.branching.tolist() == [may_branch, False]
    found.forest[0].check(10, 4)
    assert not drafts.grow(scheduled, {"b"}).forest.branching.any()
    assert WarmUpDrafts(may_branch, 3).grow(scheduled).forest.sizes.tolist() == [2, 1]
    assert not WarmUpDrafts(may_branch, 1).grow(scheduled).req_ids  # fewer nodes than requests
    scheduled.scheduled_spec_decode_tokens = {}
    assert not drafts.grow(scheduled).req_ids
