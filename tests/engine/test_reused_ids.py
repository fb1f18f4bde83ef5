"""An id that is aborted and used again at once belongs to the new request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.support.driving import engine, generate

OLD, NEW, OTHER = [5, 6, 7, 8] * 8, [9, 10, 11] * 6, [20, 21] * 5
FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
UNDER_GRAMMAR = SamplingParams(
    temperature=0,
    max_tokens=24,
    structured_outputs=StructuredOutputsParams(regex=r"(ab|cd|the age is 100, )+"),
)


@contextmanager
def ids_as_given() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        yield


def add(llm: LLM, req_id: str, prompt: list[int], params: SamplingParams) -> None:
    llm.llm_engine.add_request(req_id, TokensPrompt(prompt_token_ids=prompt), params)


def answers_after(llm: LLM, script: str, params: SamplingParams) -> dict[str, list[int]]:
    """The answers after a script: s is a step, x aborts "x", n adds it again with another prompt,
    o adds it again with the first one."""
    answers: dict[str, list[int]] = {}

    def step() -> None:
        for output in llm.llm_engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)

    add(llm, "x", OLD, params)
    add(llm, "y", OTHER, params)
    for action in script:
        if action == "s":
            step()
        elif action == "x":
            llm.llm_engine.abort_request(["x"])
        else:
            add(llm, "x", NEW if action == "n" else OLD, params)
    while llm.llm_engine.has_unfinished_requests():
        step()
    return answers


SCRIPTS = ("sssssxn", "ssssssxn", "sssssssxn", "ssxn", "sssssxsn", "sssssxoxn", "sssssxnsxn", "xn")


@pytest.mark.usefixtures("compiled_at_once")
@pytest.mark.parametrize("params", [FREE, UNDER_GRAMMAR], ids=["free", "grammar"])
def test_late_outputs_do_not_belong_to_the_next_request_with_the_id(
    params: SamplingParams, llama: Path
) -> None:
    settings = dict(skip_tokenizer_init=False)
    with engine(llama, **settings) as plain:
        new, other = (a[0] for a in generate(plain, [NEW, OTHER], params))
    with ids_as_given(), engine(llama, {"budget": 8}, **settings) as llm:
        generate(llm, [OLD, NEW, OTHER], params)  # bursts need a text that is known
        for script in SCRIPTS:
            assert answers_after(llm, script, params) == {"x": new, "y": other}, script
