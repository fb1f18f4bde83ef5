"""Answers with log-probabilities, and their comparison."""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm import LLM, SamplingParams, TokensPrompt


def answers_with_logprobs(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Any]:
    """The tokens of each answer, their log-probabilities and those of the prompt."""
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [
        (list(output.outputs[0].token_ids), output.outputs[0].logprobs, output.prompt_logprobs)
        for output in llm.generate(given, params, use_tqdm=False)
    ]


def assert_same_logprobs(mine: Any, theirs: Any) -> None:
    """Answers are compared element by element, log-probabilities up to 1e-4."""
    if theirs is None or isinstance(theirs, int | str):
        assert mine == theirs
    elif hasattr(theirs, "logprob"):
        assert mine.rank == theirs.rank
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs)
        assert_same_logprobs(list(mine.values()), list(theirs.values()))
    else:
        for a, b in zip(mine, theirs, strict=True):
            assert_same_logprobs(a, b)
