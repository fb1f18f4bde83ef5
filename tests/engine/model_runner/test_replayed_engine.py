"""An engine whose captured graphs are replayed gives plain vLLM's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.support import driving, graph_engine
from tests.support.driving import random_prompts
from tests.support.hybrid_models import HYBRIDS, use_float32_gated_delta
from tests.support.models import WANDERING, save_config
from tests.support.proposers import record


@pytest.mark.parametrize("proposer", ["hidden_path", "always_right"])
def test_graphs_with_trees_and_without(
    proposer: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(7, 50, seed=11)
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2), seed=i, max_tokens=40, ignore_eos=True, detokenize=False
        )
        for i in range(len(prompts))
    ]
    with driving.engine(llama) as plain:
        vanilla = driving.generate(plain, prompts, params)
        staggered = driving.generate_staggered(plain, prompts)
    record(prompts, vanilla)
    with monkeypatch.context() as patch:
        graph_engine.enable(patch)
        with driving.engine(llama, {"proposer": proposer, "budget": 8}) as llm:
            assert driving.generate(llm, prompts, params) == vanilla
            runner = driving.runner_of(llm)
            with_drafts = [replay for replay in runner.replays if replay.has_drafts]
            assert len(with_drafts) > 2
            branches = proposer == "hidden_path"
            assert any(replay.num_trees > 1 for replay in with_drafts) is branches
            assert (driving.drafter_of(llm).counters.moved_tokens > 20) is branches
            assert driving.generate_staggered(llm, prompts) == staggered
            # Steps without drafts have vLLM's graphs.
            assert any(not replay.has_drafts for replay in runner.replays)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_recurrent_layers_run_in_graphs_without_drafts_and_eagerly_with_trees(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_float32_gated_delta()
    model = save_config(name, tmp_path, HYBRIDS)
    lookahead = {"proposer": "hidden_path", "num_speculative_tokens": 6, "budget": 6}
    prompts = random_prompts(6, 30)
    with driving.engine(model, load_format=WANDERING) as plain:
        vanilla = driving.generate(plain, prompts)
    graph_engine.enable(monkeypatch)
    record(prompts, vanilla)
    without_drafts = driving.GREEDY.clone()
    without_drafts.extra_args = {"lookahead": {"enabled": False}}
    with driving.engine(model, lookahead, load_format=WANDERING) as llm:
        assert driving.generate_staggered(llm, prompts) == vanilla
        assert driving.drafter_of(llm).counters.moved_tokens > 20
        replays = driving.runner_of(llm).replays
        before = len(replays)
        assert driving.generate_staggered(llm, prompts, without_drafts) == vanilla
        assert len(replays) > before + 30
