"""Late drafts when requests and the device do not behave."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.engine.drafter.late_drafts import PROBE_EVERY, LateDrafts
from lookahead_vllm.engine.grammar.copies import GrammarCopies
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.engine.step.step import Step
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.proposers import TestProposer


def test_the_cache_is_saved_even_if_the_device_has_failed():
    ended: list[str] = []

    def count() -> None:
        raise RuntimeError("the device has failed")

    class Base:
        def shutdown(self) -> None:
            ended.append("vLLM")

    class Runner(LookaheadRunner, Base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._late: Any = SimpleNamespace(count=count)
            self.drafter: Any = SimpleNamespace(shutdown=lambda: ended.append("drafter"))
            self._grammars: Any = SimpleNamespace(shutdown=lambda: ended.append("grammars"))

    with pytest.raises(RuntimeError, match="the device has failed"):
        Runner().shutdown()
    assert ended == ["drafter", "grammars", "vLLM"]


def late_drafts(proposer: TestProposer) -> LateDrafts:
    drafter: Any = SimpleNamespace(
        recorder=SimpleNamespace(drafting=lambda: nullcontext()),
        surviving=lambda task: nullcontext(),
        proposer=proposer,
        options=LookaheadOptions(),
        max_model_len=100,
        max_step_nodes=100,
        may_branch=True,
        reads_reasoning=False,
        is_drafting_rank=True,
    )
    return LateDrafts(drafter, GrammarCopies(None))  # type: ignore[arg-type]


def request_of(req_id: str) -> Any:
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=[1, 2],
        prompt_len=2,
        prompt_is_token_ids=None,
        mm_features=[],
        prefill_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=9),
    )


def test_short_prompts_are_no_requests_that_decode_while_no_slots_are_reserved():
    planned: list[Any] = []

    class Proposer(TestProposer):
        def plan(self, *args: Any) -> None:
            planned.append((args[0], args[3]))

    late = late_drafts(Proposer(LookaheadOptions()))
    for req_id in ("decodes", "reads"):
        late.start(request_of(req_id))
    for _ in range(PROBE_EVERY):
        late.would_pay({"decodes": 1, "reads": 9})
    assert planned == [(["decodes"], Load(prefill=9, prompts=1, waits=True))]


@pytest.mark.parametrize("is_used_again", [False, True])
def test_no_tokens_and_choices_of_an_aborted_request_are_learned(is_used_again):
    """Not even if a new request has its id and its row when they arrive."""
    learned: list[Any] = []
    awaited: list[Any] = []

    class Proposer(TestProposer):
        def plan(self, *args: Any) -> None:
            awaited.append(args[-1])

        def read(self, request_id: str, tokens: list[int]) -> None:
            learned.append((request_id, tokens))

    late, new = late_drafts(Proposer(LookaheadOptions())), request_of("r")
    output: Any = SimpleNamespace(
        model_runner_output=SimpleNamespace(req_ids=["r"]),
        num_sampled_tokens_np=np.array([1]),
        sampled_token_ids=np.array([[5]]),
        copy_event=SimpleNamespace(),
    )
    verified: Any = SimpleNamespace(request_ids=["r"])

    def launched() -> Step:
        return Step(SchedulerOutput.make_empty(), output=output, verified=verified)

    late.start(new)
    late.add_step(launched())
    late.count()
    late.add_step(launched())
    late.finish("r")
    if is_used_again:
        late.start(new)
    late.count()
    assert (learned, awaited) == ([("r", [5])], [verified, None])
