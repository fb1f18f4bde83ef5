"""Requests that only go on are counted in a loop of our own, and get what vLLM gives them.

`counted_twice` compares both in every step of the engine tests and of the fuzzer.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from lookahead_vllm.engine.scheduler.continued_requests import ContinuedRequests
from tests.support import counted_twice
from tests.support.driving import engine, random_prompts
from tests.support.late_steps import LateSteps, random_arrivals

SLOTS = {"num_speculative_tokens": 16, "budget": 16}


def run(llama: Path, seed: int = 0) -> tuple[LateSteps, int]:
    """The steps of random requests, and how many times a request was counted and compared."""
    rng = random.Random(seed)
    steps = LateSteps(llama, 40, SLOTS, lambda slots: rng.randrange(slots + 1), max_model_len=64)
    counted_twice.CHECKED.clear()
    counted_twice.SCHEDULED.clear()
    steps.run(random_arrivals(random.Random(seed), 60, 40))
    return steps, sum(counted_twice.CHECKED)


@pytest.mark.parametrize("seed", range(2))
def test_most_are_counted_here_and_get_what_vllm_gives_them(seed: int, llama: Path) -> None:
    steps, num_compared = run(llama, seed)
    assert len(counted_twice.SCHEDULED) > 20
    assert num_compared > 0.3 * sum(map(len, steps.scheduled))  # answers are short


@pytest.mark.parametrize(
    "field", ["num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens"]
)
def test_a_wrong_count_is_found(field: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = ContinuedRequests.__dict__["count"].__wrapped__

    def wrong(self: Any, step: Any, *args: Any) -> Any:
        rest, counted = count(self, step, *args)
        for outputs in counted.values():
            request = self._scheduler.requests[outputs[0].request_id]
            setattr(request, field, getattr(request, field) + 1)
        return rest, counted

    monkeypatch.setattr(ContinuedRequests, "count", counted_twice.comparing(wrong))
    with pytest.raises(AssertionError):
        run(llama)


def test_a_request_that_needs_more_is_counted_by_vllm(llama: Path) -> None:
    """And its answer is the same beside others."""
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    with_logprobs = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=1
    )
    [prompt] = random_prompts(1, 9)
    with engine(llama, SLOTS, drafts=None, enable_prefix_caching=True) as llm:
        counted_twice.CHECKED.clear()
        first, second = llm.generate([prompt, prompt], [plain, with_logprobs], use_tqdm=False)
        num_compared = sum(counted_twice.CHECKED)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.outputs[0].logprobs is not None and len(second.outputs[0].logprobs) == 12
    assert 0 < num_compared < 12
