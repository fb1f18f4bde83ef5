"""V2 on a CPU: its stand-ins equal vLLM's kernels, and its engines give one output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.support import v2_on_cpu
from tests.support.driving import engine, generate, random_prompts
from tests.support.v2_on_cpu import cases, stand_in
from tests.support.v2_on_cpu import logit_cases as logit_cases  # which registers its cases
from tests.support.v2_on_cpu import speculator_cases as speculator_cases

MARKERS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}

IS_INTERPRETED = "TRITON_INTERPRETED" in os.environ
"""Whether Triton interprets vLLM's kernels in this process."""

KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=0.9, seed=3),
    dict(temperature=0.7, seed=-7, top_k=20),
    dict(temperature=1.2, seed=2**62, top_p=0.8, n=2),
    dict(temperature=0.9, seed=4, repetition_penalty=1.3, min_p=0.05),
    dict(temperature=0.9, seed=5, presence_penalty=0.7, frequency_penalty=0.4),
    dict(temperature=0.9, seed=6, logit_bias={7: 4.0}, min_tokens=6, stop_token_ids=[9, 60]),
    dict(temperature=0.9, seed=7, allowed_token_ids=list(range(3, 60))),
    dict(temperature=0, logprobs=3, prompt_logprobs=2),
    dict(temperature=1, seed=8, bad_words=["q", "the", "ab", "in"]),
    dict(temperature=1, seed=9, thinking_token_budget=3),
    dict(
        temperature=0.8,
        seed=10,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{3}[0-9]{9}"),
    ),
]


@pytest.mark.skipif(not IS_INTERPRETED, reason="in a process of its own")
@pytest.mark.parametrize("kernel", sorted(cases.CASES))
def test_a_stand_in_equals_vllms_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    v2_on_cpu.load_stand_ins()
    module, name = stand_in.home_of(kernel)
    for seed in range(2):
        expected = cases.CASES[kernel](torch.Generator().manual_seed(seed))
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stand_in.STAND_INS[kernel])
            actual = cases.CASES[kernel](torch.Generator().manual_seed(seed))
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(IS_INTERPRETED, reason="this is it")
def test_every_stand_in_equals_vllms_kernel() -> None:
    pytest.importorskip("triton")
    v2_on_cpu.load_stand_ins()
    assert set(cases.CASES) == set(stand_in.STAND_INS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__],
        env={**os.environ, "TRITON_INTERPRETED": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{len(cases.CASES)} passed" in done.stdout


def outputs_of(llm: LLM, prompts: list[list[int]], kinds: list[dict[str, Any]]) -> list[Any]:
    """Tokens and logprobs of each answer, and logprobs of each prompt."""
    params = [SamplingParams(**kind, max_tokens=24, detokenize=False) for kind in kinds]
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [
        ([(list(o.token_ids), o.logprobs) for o in output.outputs], output.prompt_logprobs)
        for output in llm.generate(inputs, params, use_tqdm=False)
    ]


@pytest.mark.skipif(IS_INTERPRETED, reason="needs the stand-ins")
def test_synchronous_and_asynchronous_steps_give_one_output(llama: Path) -> None:
    """Of all kinds with chunked prompts; greedy requests get that of the first runner."""
    prompts = random_prompts(len(KINDS), 40, seed=4)
    prompts = [[*prompt, *prompts[0]] for prompt in prompts]
    settings = dict(skip_tokenizer_init=False, max_num_batched_tokens=96, reasoning_config=MARKERS)
    outputs, greedy = [], []
    for asynchronous in (False, True):
        with v2_on_cpu.enabled(asynchronous), engine(llama, **settings) as llm:
            config = llm.llm_engine.vllm_config
            assert config.use_v2_model_runner
            assert config.scheduler_config.async_scheduling == asynchronous
            outputs.append(outputs_of(llm, prompts, KINDS))
            greedy.append(generate(llm, prompts))
    assert outputs[0] == outputs[1]
    with engine(llama, **settings) as first:
        assert not first.llm_engine.vllm_config.use_v2_model_runner
        assert [generate(first, prompts)] * 2 == greedy
