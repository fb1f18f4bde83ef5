"""Recurrent layers in an engine whose captured graphs are replayed."""

import pytest

from tests.support import driving, graph_engine
from tests.support.driving import random_prompts
from tests.support.hybrid_models import HYBRIDS, use_float32_gated_delta
from tests.support.models import WANDERING, save_config


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_recurrent_layers_run_in_graphs_without_drafts_and_eagerly_with_trees(
    name, tmp_path, monkeypatch
):
    use_float32_gated_delta()
    model = save_config(name, tmp_path, HYBRIDS)
    lookahead = {"proposer": "hidden_path", "num_speculative_tokens": 6, "budget": 6}
    prompts = random_prompts(6, 30)
    vanilla = driving.record_plain(model, prompts, load_format=WANDERING)
    graph_engine.enable(monkeypatch)
    without_drafts = driving.of_length(40, extra_args={"lookahead": {"enabled": False}})
    with driving.engine(model, lookahead, load_format=WANDERING) as llm:
        assert driving.generate_staggered(llm, prompts) == vanilla
        assert driving.drafter_of(llm).counters.moved_tokens > 20
        replays = driving.runner_of(llm).replays
        before = len(replays)
        assert driving.generate_staggered(llm, prompts, without_drafts) == vanilla
        assert len(replays) > before + 30
