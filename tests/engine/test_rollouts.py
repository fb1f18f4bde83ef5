"""Rollouts: groups of samples, and weights that change between them, as trainers do it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.driving import drafter_of, engine, generate
from tests.support.models import save_tiny_model

PROMPT = list(range(20, 60))
LOOKAHEAD = {"method": "lookahead", "proposer": "ngram_trie", "budget": 8, "max_nodes": 65536}


def samples(n: int, epoch: int = 0) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1.0, seed=100 * epoch + i, max_tokens=24, ignore_eos=True)
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with slightly different weights."""
    first = save_tiny_model("llama", tmp_path_factory.mktemp("first"))
    second = save_tiny_model("llama", tmp_path_factory.mktemp("second"))
    weights = load_file(second / "model.safetensors")
    torch.manual_seed(1)
    changed = {
        name: weight + 0.01 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else weight
        for name, weight in weights.items()
    }
    save_file(changed, second / "model.safetensors", metadata={"format": "pt"})
    return [first, second]


def load_by_vllm(llm: LLM, checkpoint: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})


def test_samples_equal_plain_vllms_before_and_after_a_change_of_weights(checkpoints):
    answers: list[list[Any]] = []
    for config in (None, LOOKAHEAD):
        with engine(checkpoints[0], config) as llm:
            epochs: list[Any] = []
            answers.append(epochs)
            for epoch, checkpoint in enumerate([*checkpoints, *checkpoints]):
                if epoch:
                    load_by_vllm(llm, checkpoint)
                epochs.append(generate(llm, [PROMPT] * 8, samples(8, epoch % 2)))
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][2] != answers[0][1]


def test_samples_of_a_group_draft_from_each_other_while_they_run(checkpoints):
    accepted = {}
    for share in ("none", "namespace"):
        with engine(checkpoints[0], {**LOOKAHEAD, "share": share}, drafts=None) as llm:
            generate(llm, [PROMPT], SamplingParams(n=8, seed=1, max_tokens=24, temperature=0.3))
            accepted[share] = drafter_of(llm).counters.accepted_nodes
    assert accepted["namespace"] > 1.2 * accepted["none"]


def test_the_loop_of_a_trainer_with_async_llm(checkpoints):
    """Generate, change the weights, generate, with an engine in a process of its own."""

    async def rollouts(config: dict[str, Any] | None) -> list[list[list[int]]]:
        args = AsyncEngineArgs(
            model=str(checkpoints[0]),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=256,
            speculative_config=config,
        )
        llm = AsyncLLM.from_engine_args(args)
        try:
            return [epoch async for epoch in epochs(llm)]
        finally:
            llm.shutdown()

    async def epochs(llm: AsyncLLM) -> Any:
        for epoch, checkpoint in enumerate(checkpoints):
            if epoch:
                await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
                await llm.reset_prefix_cache()
            yield await asyncio.gather(
                *(one(llm, params, f"{epoch}-{i}") for i, params in enumerate(samples(4, epoch)))
            )

    async def one(llm: AsyncLLM, params: SamplingParams, request_id: str) -> list[int]:
        prompt = TokensPrompt(prompt_token_ids=PROMPT)
        tokens: list[int] = []
        async for output in llm.generate(prompt, params, request_id):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    plain, drafted = (asyncio.run(rollouts(config)) for config in (None, LOOKAHEAD))
    assert plain == drafted and plain[0] != plain[1]
