"""Backoff: most steps draft nothing after no node paid for a while, and no token is lost.

On the second runner, the scheduler reserves no slots meanwhile: a pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams, TokensPrompt

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine.scheduler.late_scheduler import PAUSE_AFTER_STEPS
from lookahead_vllm.engine.worker.drafter import BACKOFF_AFTER_STEPS, BACKOFF_STEPS
from lookahead_vllm.engine.worker.v2.late_drafts import PROBE_EVERY
from tests.support.driving import drafter_of, engine, generate
from tests.support.proposers import Planned

PROMPT = [5, 6, 7, 8]
ON_V1, ON_V2 = (
    pytest.mark.parametrize("shared_runner", [name], indirect=True) for name in ("v1", "v2")
)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def answer(llama: Path, shared_runner: str) -> list[int]:
    with engine(llama) as plain:
        return generate(plain, [PROMPT], greedy(90))[0][0]


@pytest.fixture(scope="module")
def planned(llama: Path, answer: list[int]) -> Iterator[LLM]:  # after the other engine
    with engine(llama, {"proposer": "planned"}) as llm:
        yield llm


def scheduler_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture
def drafted_lengths(planned: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Length of the answer at each call of `propose`."""
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
    monkeypatch.setattr(scheduler_of(planned), "_empty_steps", 0, raising=False)
    yield lengths


@ON_V1
def test_steps_without_drafts_alternate_until_a_node_pays(
    planned: LLM, drafted_lengths: list[int], answer: list[int]
) -> None:
    found = BACKOFF_AFTER_STEPS + 5 * (1 + BACKOFF_STEPS)  # tokens of the answer
    Planned.TREES[tuple(answer[:found])] = DraftTree.chain(answer[found : found + 10])
    assert generate(planned, [PROMPT], greedy(90))[0][0] == answer
    in_backoff = range(BACKOFF_AFTER_STEPS, found + 1, 1 + BACKOFF_STEPS)
    drafting = range(found + 11, found + 11 + BACKOFF_AFTER_STEPS)
    assert [n for n in drafted_lengths if n < drafting[-1] + BACKOFF_STEPS] == [
        *range(1, BACKOFF_AFTER_STEPS),
        *in_backoff,
        *drafting,
    ]


@ON_V2
def test_every_fourth_step_of_a_pause_looks_whether_a_node_pays(
    planned: LLM, drafted_lengths: list[int], answer: list[int]
) -> None:
    found = 50
    for n in range(found, len(answer)):
        Planned.TREES[tuple(answer[:n])] = DraftTree.chain(answer[n : n + 4])
    before = drafter_of(planned).counters.accepted_nodes
    assert generate(planned, [PROMPT], greedy(90))[0][0] == answer
    # Two steps are scheduled before the last empty one is known.
    with_slots = [n for n in drafted_lengths if n <= PAUSE_AFTER_STEPS + 2]
    assert with_slots[:PAUSE_AFTER_STEPS] == list(range(1, PAUSE_AFTER_STEPS + 1))
    probes = [n for n in drafted_lengths if PAUSE_AFTER_STEPS + 2 < n <= found + PROBE_EVERY]
    assert {b - a for a, b in pairwise(probes)} == {PROBE_EVERY}
    assert drafter_of(planned).counters.accepted_nodes > before + 20


def test_tokens_of_a_backoff_reach_the_proposer_afterwards(
    planned: LLM, drafted_lengths: list[int], answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer: Any = drafter_of(planned).proposer
    heard: list[list[int]] = []
    finish = proposer.finish

    def watched(request_id: str) -> None:
        heard.append(proposer.outputs[request_id])
        finish(request_id)

    monkeypatch.setattr(proposer, "finish", watched)
    for length in range(BACKOFF_AFTER_STEPS, BACKOFF_AFTER_STEPS + 2 + BACKOFF_STEPS):
        generate(planned, [PROMPT], greedy(length))
        generate(planned, [PROMPT], greedy(1))  # the engine hears of an end in the next step
        assert heard.pop() == answer[:length]
    assert not drafter_of(planned)._uncommitted


@ON_V1
def test_a_new_request_ends_the_backoff(
    planned: LLM, drafted_lengths: list[int], answer: list[int]
) -> None:
    core = planned.llm_engine
    core.add_request("old", TokensPrompt(prompt_token_ids=PROMPT), greedy(60))
    while not drafted_lengths or drafted_lengths[-1] < BACKOFF_AFTER_STEPS:
        core.step()
    core.step()  # at rest
    assert drafted_lengths[-1] == BACKOFF_AFTER_STEPS
    core.add_request("new", TokensPrompt(prompt_token_ids=PROMPT), greedy(60))
    core.step()
    assert drafted_lengths[-2:] == [BACKOFF_AFTER_STEPS + 2, 1]
    answers = {}
    while core.has_unfinished_requests():
        for output in core.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    assert answers["old"] == answers["new"] == answer[:60]
