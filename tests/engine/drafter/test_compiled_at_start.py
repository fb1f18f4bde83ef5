"""All kernels that serving calls are compiled at start-up."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    generate_staggered,
    of_length,
    random_prompts,
)
from tests.support.kernels import compiled, compiled_since, reset_kernels


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    reset_kernels()


def requests() -> list[SamplingParams]:
    """One of each kind."""
    prose = list(range(20, 60))
    return [
        of_length(30),
        of_length(30, temperature=0.8, seed=1, n=2),
        of_length(30, temperature=0.8, seed=2, repetition_penalty=1.2),
        of_length(2),
        of_length(30, logprobs=2),
        of_length(30, extra_args={"lookahead": {"namespace": "a", "reference": prose}}),
        of_length(30, extra_args={"lookahead": {"enabled": False}}),
        SamplingParams(
            temperature=0,
            max_tokens=30,
            structured_outputs=StructuredOutputsParams(regex=r"(x|y) the age is (100|[a-f]+)\."),
        ),
    ]


@pytest.mark.parametrize(
    ("proposer", "budget"),
    [("ngram_trie", "auto"), ("jacobi_window", 12), ("hybrid", 12)],
)
def test_requests_compile_nothing(proposer, budget, llama):
    lookahead = {"proposer": proposer, "budget": budget, "num_speculative_tokens": 12}
    settings: dict[str, Any] = dict(
        skip_tokenizer_init=False,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=20,
        enforce_eager=False,  # else vLLM warms no kernels up
        compilation_config={"mode": 0},
    )
    params = requests()
    prompts = [prompt * 2 for prompt in random_prompts(len(params), 30, vocab=20, seed=3)]
    with engine(llama, lookahead, **settings) as llm:
        if budget == "auto":  # nodes are sent, however slow the machine
            drafter_of(llm).proposer.cost = StepCost(CostCurve([1, 1024], [10.0, 10.1]))
        at_start = compiled()
        for _ in range(2):
            generate(llm, prompts, params)
            generate_staggered(llm, prompts, params[0], abort=[1])
        assert drafter_of(llm).counters.branching_trees and drafter_of(llm).counters.accepted_nodes
        assert not compiled_since(at_start)
