"""Requests that only go on are counted in a loop of our own, and get what vLLM gives them.

`counted_twice` compares both in every step of the engine tests and of the fuzzer.
"""

import random

import pytest

from tests.support import counted_twice
from tests.support.driving import engine, of_length, random_prompts
from tests.support.late_steps import LateSteps, random_arrivals

SLOTS = {"num_speculative_tokens": 16, "budget": 16}


@pytest.mark.parametrize("seed", range(2))
def test_most_are_counted_here_and_get_what_vllm_gives_them(seed, llama):
    rng = random.Random(seed)
    steps = LateSteps(llama, 40, SLOTS, lambda slots: rng.randrange(slots + 1), max_model_len=64)
    counted_twice.CHECKED.clear()
    counted_twice.SCHEDULED.clear()
    steps.run(random_arrivals(random.Random(seed), 60, 40))
    assert len(counted_twice.SCHEDULED) > 20
    assert sum(counted_twice.CHECKED) > 0.3 * sum(map(len, steps.scheduled))  # answers are short


def test_a_request_that_needs_more_is_counted_by_vllm(llama):
    """And its answer is the same beside others."""
    plain, with_logprobs = of_length(12), of_length(12, logprobs=1)
    [prompt] = random_prompts(1, 9)
    with engine(llama, SLOTS, drafts=None, enable_prefix_caching=True) as llm:
        counted_twice.CHECKED.clear()
        first, second = llm.generate([prompt, prompt], [plain, with_logprobs], use_tqdm=False)
        num_compared = sum(counted_twice.CHECKED)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.outputs[0].logprobs is not None and len(second.outputs[0].logprobs) == 12
    assert 0 < num_compared < 12
