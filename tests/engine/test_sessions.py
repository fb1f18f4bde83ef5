"""Requests whose id comes again: the next turn of a streaming session, or another request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.request import RequestStatus

from tests.support.driving import GREEDY, drafter_of, engine, generate, random_prompts
from tests.support.proposers import record

pytestmark = pytest.mark.usefixtures("runner")

TURNS = [*random_prompts(1, 40, seed=61), [5, 6], [7], [8, 9, 10]]
MODES = {"hidden_path": {"proposer": "hidden_path"}, "trie": {"proposer": "ngram_trie"}}


def answers_of(llm: LLM, stop: int, name: str = "a") -> list[list[int]]:
    """The answer of each turn of a session, which ends at the token `stop`."""
    params = SamplingParams(
        temperature=0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True, detokenize=False
    )
    core = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    answers: list[list[int]] = []
    for turn in TURNS:
        core.add_request(
            llm.llm_engine.input_processor.process_inputs(
                name,
                TokensPrompt(prompt_token_ids=list(turn)),  # a session extends it
                params,
                core.get_supported_tasks(),
                resumable=True,
            )
        )
        answers.append([])
        request = scheduler.requests[name]
        while request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            for output in core.get_output().outputs:
                answers[-1] += output.new_token_ids
    core.abort_requests([name])
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_a_session_goes_on_after_a_stop_inside_a_draft(mode: str, llama: Path) -> None:
    lookahead: dict[str, Any] = {**MODES[mode], "budget": 16}
    with engine(llama, enable_prefix_caching=True) as plain:
        text = generate(plain, TURNS[:1])[0][0]
        stop = next(token for i, token in enumerate(text) if i > 5 and token not in text[:i])
        vanilla = answers_of(plain, stop)
    record(TURNS[:1], [[text]])  # drafts go on after the stop
    with engine(llama, lookahead, enable_prefix_caching=True) as llm:
        assert answers_of(llm, stop) == vanilla
        assert answers_of(llm, stop, "b") == vanilla
        assert drafter_of(llm).counters.accepted_nodes > 3
    assert vanilla[0][-1] == stop and len(vanilla[-1]) > 1


@pytest.mark.parametrize("runner", ["v1"], indirect=True)  # vLLM's V2 credits tokens by id
def test_a_request_may_have_the_id_of_an_aborted_one(
    runner: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    first, second = random_prompts(2, 30, seed=91)
    with engine(llama) as plain:
        vanilla = generate(plain, [first, second])
    record([first, second], vanilla)
    with engine(llama, {"proposer": "hidden_path", "budget": 8}) as llm:
        for steps in (1, 3, 4):
            assert answer_after_abort(llm, first, second, steps) == vanilla[1][0]


def answer_after_abort(llm: LLM, first: list[int], second: list[int], steps: int) -> list[int]:
    """The answer to `second` under the id of `first`, which is aborted after some steps."""
    core, answer = llm.llm_engine, []
    core.add_request("same", TokensPrompt(prompt_token_ids=list(first)), GREEDY)
    for _ in range(steps):
        core.step()
    core.abort_request(["same"], internal=True)
    core.add_request("same", TokensPrompt(prompt_token_ids=list(second)), GREEDY)
    while core.has_unfinished_requests():
        for output in core.step():
            answer = list(output.outputs[0].token_ids)
    return answer
