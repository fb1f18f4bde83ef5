"""Late drafts when requests and the device do not behave."""

import logging
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput

from lookahead_vllm import machine
from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine.drafter.late_drafts import PROBE_EVERY, LateDrafts
from lookahead_vllm.engine.grammar import copies as grammar_copies
from lookahead_vllm.engine.grammar.copies import GrammarCopies
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.engine.step.step import Step
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.proposers import TestProposer


def _copies(monkeypatch: pytest.MonkeyPatch, manager: type, *req_ids: str) -> GrammarCopies:
    """With these requests or "r", whose grammars a `manager` in place of vLLM's compiles."""
    monkeypatch.setattr(grammar_copies, "StructuredOutputManager", manager)
    copies = GrammarCopies(None)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    new = dict(prompt_token_ids=[1], prompt_embeds=None, sampling_params=params)
    for req_id in req_ids or ["r"]:
        copies.start(SimpleNamespace(req_id=req_id, **new))  # type: ignore[arg-type]
    return copies


def test_without_a_compiled_grammar_there_is_no_draft_and_no_wait(monkeypatch):
    may_start = threading.Event()

    class Manager:
        def __init__(self, config: Any) -> None:
            assert may_start.wait(60)
            self.initialised: list[str] = []

        def grammar_init(self, request: Any) -> None:
            self.initialised.append(request.request_id)
            request.structured_output_request.grammar = object()

        def clear_backend(self) -> None:
            self.initialised.clear()

    copies = _copies(monkeypatch, Manager, "r", "ended")
    copies.finish("ended")
    draft = "r", DraftTree.from_lists([5], [-1]), 4, 4
    assert not len(copies.complete(*draft))
    copies.advance("r", [5])
    may_start.set()
    copies._compiling.submit(lambda: None).result()
    assert not len(copies.complete(*draft))  # the grammar has not read the first token
    assert copies._manager.initialised == ["r"]  # type: ignore[union-attr]
    copies.shutdown()


@pytest.mark.parametrize("fails_to", ["accept", "raise", "walk"])
def test_a_copy_of_a_grammar_that_fails_costs_only_drafts(monkeypatch, fails_to, caplog):
    class Grammar: ...

    class Manager:
        def __init__(self, config: Any) -> None:
            self.backend = SimpleNamespace()  # which no walk can begin with

        def grammar_init(self, request: Any) -> None:
            request.structured_output_request.grammar = Grammar()

        def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
            logging.getLogger(__name__).error("as vLLM does for a token that is refused")
            if fails_to == "raise":
                raise RuntimeError("no state")
            return fails_to != "accept"

        def clear_backend(self) -> None: ...

    copies = _copies(monkeypatch, Manager)
    copies._compiling.submit(lambda: None).result()
    for _ in range(2):
        copies.advance("r", [5])
        assert not len(copies.complete("r", DraftTree.from_lists([5], [-1]), 4, 4))
    assert not caplog.records and not logging.getLogger(__name__).disabled
    copies.shutdown()


def test_grammars_are_compiled_on_all_cores(monkeypatch):
    """vLLM binds the thread that starts the compiler to one of them."""
    cores: list[set[int]] = []

    class Manager:
        def __init__(self, config: Any) -> None:
            cores.append(os.sched_getaffinity(0))

        def grammar_init(self, request: Any) -> None: ...

        def clear_backend(self) -> None: ...

    os.sched_setaffinity(0, {min(machine.CPUS_AT_START)})
    try:
        copies = _copies(monkeypatch, Manager)
    finally:
        machine.use_all_cores()
    copies._compiling.submit(lambda: None).result()
    copies.shutdown()
    assert cores == [machine.CPUS_AT_START]


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
