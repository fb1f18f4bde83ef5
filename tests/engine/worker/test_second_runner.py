"""Lookahead's output equals that of vLLM's second model runner, the default on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.driving import drafter_of, engine, generate, random_prompts
from tests.support.proposers import record

IS_BROUGHT = "SECOND_RUNNER" in os.environ
ONE_CALL: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=0.9, seed=3),
    dict(temperature=0.7, seed=-7, top_k=20),
    dict(temperature=1.2, seed=2**62, top_p=0.8, n=2),
]
"""Root and nodes are sampled together."""
LOOKING_BACK: list[dict[str, Any]] = [
    *ONE_CALL,
    dict(temperature=0.9, seed=4, repetition_penalty=1.3, min_p=0.05),
    dict(temperature=0.9, seed=5, logit_bias={7: 4.0}, min_tokens=6, stop_token_ids=[9, 60]),
    dict(temperature=0.9, seed=6, allowed_token_ids=list(range(3, 60))),
]


@pytest.mark.skipif(not IS_BROUGHT, reason="in a process of its own")
@pytest.mark.parametrize("extras", [ONE_CALL, LOOKING_BACK], ids=["one_call", "looking_back"])
def test_same_tokens(extras: list[dict[str, Any]], llama: Path) -> None:
    params = [SamplingParams(**extra, max_tokens=10, detokenize=False) for extra in extras]
    prompts = random_prompts(len(params), 12, seed=5)
    with engine(llama) as plain:
        assert plain.llm_engine.vllm_config.use_v2_model_runner
        vanilla = generate(plain, prompts, params)
    record(prompts, vanilla)
    lookahead = dict(proposer="hidden_path", budget=6, num_speculative_tokens=6)
    with engine(llama, lookahead) as llm:
        assert not llm.llm_engine.vllm_config.use_v2_model_runner
        assert generate(llm, prompts, params) == vanilla
        counters = drafter_of(llm).counters
        assert counters.accepted_nodes > 10
        assert counters.branching_trees > 10


@pytest.mark.skipif(IS_BROUGHT, reason="this is it")
def test_second_runner_in_a_process_of_its_own() -> None:
    pytest.importorskip("triton")
    guided = Path(__file__).parents[1] / "test_target_guided.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", __file__, str(guided)],
        env={**os.environ, "SECOND_RUNNER": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "5 passed" in done.stdout
