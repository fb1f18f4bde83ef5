"""Trees on models with positions of several dimensions (M-RoPE), and with latent attention."""

import random
from typing import Any

import pytest
from vllm import TokensPrompt

from tests.support.driving import (
    GREEDY,
    drafter_of,
    engine,
    generate,
    generate_staggered,
    obstacle_of,
    of_length,
    record_plain,
    runner_of,
)
from tests.support.models import PATCHES, WANDERING, save_config
from tests.support.proposers import record

HIDDEN = {"proposer": "hidden_path", "budget": 16}
SETTINGS: dict[str, Any] = dict(load_format=WANDERING, block_size=32)
SEEDED = of_length(40, temperature=0.9, seed=3, top_k=40)


def image_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Text, an image of 4 to 20 patches, and text."""
    rng = random.Random(seed)

    def text() -> list[int]:
        return [rng.randrange(3, PATCHES.start) for _ in range(rng.randint(1, 20))]

    return [[*text(), *rng.choices(PATCHES, k=rng.randint(4, 20)), *text()] for _ in range(count)]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "deepseek_v2", "deepseek_v3"])
def test_trees_give_plain_vllms_output(name, tmp_path):
    """Greedy and seeded, with staggered arrivals; trees branch and KV slots move."""
    model, prompts = save_config(name, tmp_path), image_prompts(12)
    with engine(model, **SETTINGS) as plain:
        vanilla = {i: generate(plain, prompts, p) for i, p in enumerate((GREEDY, SEEDED))}
    with engine(model, HIDDEN, **SETTINGS) as llm:
        assert obstacle_of(llm) is None
        for i, params in enumerate((GREEDY, SEEDED)):
            record(prompts, vanilla[i])
            before = drafter_of(llm).counters.moved_tokens
            assert generate_staggered(llm, prompts, params) == vanilla[i]
            assert drafter_of(llm).counters.moved_tokens > before + 30
        assert drafter_of(llm).counters.branching_trees > 100


def test_a_step_without_requests_has_no_trees(tmp_path):
    """As on an idle rank under data parallelism, after a step whose trees branched."""
    model, prompts = save_config("qwen2_vl", tmp_path), image_prompts(4)
    vanilla = record_plain(model, prompts, GREEDY, **SETTINGS)
    with engine(model, HIDDEN, **SETTINGS) as llm:
        record(prompts, vanilla)
        core, runner = llm.llm_engine, runner_of(llm)
        core.add_request("r", TokensPrompt(prompt_token_ids=prompts[0]), GREEDY)
        while not runner.step.trees.branches:
            core.step()
        core.abort_request(["r"])
        llm.collective_rpc("execute_dummy_batch")
        assert generate(llm, prompts) == vanilla


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_rows_of_latent_attention_are_rounded_as_decode_rows(name, tmp_path):
    """In bfloat16 ties fall as in plain vLLM, in trees and in chains.

    vLLM's kernel divides its sums by the number of rows, so on some processors a tie falls
    differently between two batches of plain vLLM, too.
    """

    def num_differing() -> int:
        return sum(a != b for a, b in zip(generate(llm, prompts), vanilla, strict=True))

    model, prompts = save_config(name, tmp_path), image_prompts(12)
    settings = {**SETTINGS, "dtype": "bfloat16"}
    vanilla = record_plain(model, prompts, **settings)
    with engine(model, HIDDEN, **settings) as llm:
        assert num_differing() <= 1
        counters = drafter_of(llm).counters
        trees, accepted = counters.branching_trees, counters.accepted_nodes
        assert trees > 50 and accepted > 50
        drafter_of(llm).may_branch = False
        assert num_differing() <= 1
        assert counters.branching_trees == trees and counters.accepted_nodes > accepted + 50
        runner = runner_of(llm)
        runner._branching = runner._branching._replace(of_chains=False)
        # vLLM computes chains as prompts.
        assert num_differing() > len(prompts) / 2


# vLLM turns prefix caching and chunked prefill off for latent attention on CPUs.
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("qwen2_vl", {"enable_prefix_caching": True}, id="prefix_caching"),
        pytest.param("qwen3_vl", {"max_num_batched_tokens": 48, "max_num_seqs": 3}, id="chunks"),
        pytest.param("qwen2_vl", {"num_gpu_blocks_override": 14}, id="preemption"),
        pytest.param("deepseek_v2", {"num_gpu_blocks_override": 28}, id="preemption, latent"),
    ],
)
def test_engine_settings_keep_the_output(name, settings, tmp_path, preempted):
    shared, params = image_prompts(1, seed=1)[0], of_length(90)
    prompts = [(shared + prompt)[:70] for prompt in image_prompts(8, seed=2)]
    model = save_config(name, tmp_path)
    vanilla = record_plain(model, prompts, params, **SETTINGS)
    with engine(model, HIDDEN, **{**SETTINGS, **settings}) as llm:
        assert generate_staggered(llm, prompts, params) == vanilla
        assert generate(llm, prompts, params) == vanilla
        assert drafter_of(llm).counters.moved_tokens > 50
    assert bool(preempted) == ("num_gpu_blocks_override" in settings)
