"""Where nothing is worth sending, most steps are passed over, and nothing is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams, TokensPrompt

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine.worker.drafter import BACKOFF, BACKOFF_AFTER
from tests.support.driving import drafter_of, engine, generate
from tests.support.proposers import Planned

PROMPT = [5, 6, 7, 8]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def answer(llama: Path) -> list[int]:
    with engine(llama) as plain:
        return generate(plain, [PROMPT], greedy(90))[0][0]


@pytest.fixture(scope="module")
def planned(llama: Path, answer: list[int]) -> Iterator[LLM]:  # after the other engine
    with engine(llama, {"proposer": "planned"}) as llm:
        yield llm


@pytest.fixture
def looked(planned: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How long the answers were that drafts were asked for, call by call."""
    proposer: Any = drafter_of(planned).proposer
    lengths: list[int] = []
    propose = proposer.propose

    def watched(limits: Any, load: Any) -> Any:
        lengths.extend(len(proposer.outputs[limit.request_id]) for limit in limits)
        return propose(limits, load)

    monkeypatch.setattr(proposer, "propose", watched)
    monkeypatch.setattr(Planned, "TREES", {})
    monkeypatch.setattr(drafter_of(planned), "_steps_without_nodes", 0)
    monkeypatch.setattr(drafter_of(planned), "backoff_left", 0)
    yield lengths


def test_steps_are_passed_over_until_something_is_found(
    planned: LLM, looked: list[int], answer: list[int]
) -> None:
    found = BACKOFF_AFTER + 5 * (1 + BACKOFF)  # tokens of the answer
    Planned.TREES[tuple(answer[:found])] = DraftTree.chain(answer[found : found + 10])
    assert generate(planned, [PROMPT], greedy(90))[0][0] == answer
    at_rest = range(BACKOFF_AFTER, found + 1, 1 + BACKOFF)
    awake = range(found + 11, found + 11 + BACKOFF_AFTER)
    assert [n for n in looked if n < awake[-1] + BACKOFF] == [
        *range(1, BACKOFF_AFTER),
        *at_rest,
        *awake,
    ]


def test_what_was_said_at_rest_is_heard_in_the_end(
    planned: LLM, looked: list[int], answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer: Any = drafter_of(planned).proposer
    heard: list[list[int]] = []
    finish = proposer.finish

    def watched(request_id: str) -> None:
        heard.append(proposer.outputs[request_id])
        finish(request_id)

    monkeypatch.setattr(proposer, "finish", watched)
    for length in range(BACKOFF_AFTER, BACKOFF_AFTER + 2 + BACKOFF):
        generate(planned, [PROMPT], greedy(length))
        generate(planned, [PROMPT], greedy(1))  # the engine hears of an end in the next step
        assert heard.pop() == answer[:length]
    assert not drafter_of(planned)._uncommitted


def test_a_new_request_is_looked_at_at_once(
    planned: LLM, looked: list[int], answer: list[int]
) -> None:
    core = planned.llm_engine
    core.add_request("old", TokensPrompt(prompt_token_ids=PROMPT), greedy(60))
    while not looked or looked[-1] < BACKOFF_AFTER:
        core.step()
    core.step()  # at rest
    assert looked[-1] == BACKOFF_AFTER
    core.add_request("new", TokensPrompt(prompt_token_ids=PROMPT), greedy(60))
    core.step()
    assert looked[-2:] == [BACKOFF_AFTER + 2, 1]
    answers = {}
    while core.has_unfinished_requests():
        for output in core.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    assert answers["old"] == answers["new"] == answer[:60]
