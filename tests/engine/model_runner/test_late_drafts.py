"""Late drafts when requests and the device do not behave."""

from __future__ import annotations

import pickle
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput

from lookahead_vllm.draft.progress import GONE
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.model_runner import grammar_copies
from lookahead_vllm.engine.model_runner.drafts import Drafts
from lookahead_vllm.engine.model_runner.grammar_copies import GrammarCopies
from lookahead_vllm.engine.model_runner.late_drafts import LateDrafts
from lookahead_vllm.engine.model_runner.runner import LookaheadRunner
from lookahead_vllm.engine.model_runner.step import Step
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.driving import drafter_of, engine, generate, random_prompts
from tests.support.proposers import TestProposer


def test_without_a_compiled_grammar_there_is_no_draft_and_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    monkeypatch.setattr(grammar_copies, "StructuredOutputManager", Manager)
    copies = grammar_copies.GrammarCopies(None)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    copies.start(
        SimpleNamespace(  # type: ignore[arg-type]
            req_id="r", prompt_token_ids=[1], prompt_embeds=None, sampling_params=params
        )
    )
    draft = "r", DraftTree.from_lists([5], [-1]), 4, 4
    assert not len(copies.complete(*draft))
    copies.advance("r", [5])
    may_start.set()
    copies._compiling.submit(lambda: None).result()
    assert not len(copies.complete(*draft))  # the grammar has not read the first token
    assert copies._manager.initialised == ["r"]  # type: ignore[union-attr]
    copies.shutdown()


def test_the_cache_is_saved_even_if_the_device_has_failed() -> None:
    ended: list[str] = []

    def learn() -> None:
        raise RuntimeError("the device has failed")

    class Base:
        def shutdown(self) -> None:
            ended.append("vLLM")

    class Runner(LookaheadRunner, Base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._late: Any = SimpleNamespace(learn=learn)
            self.drafter: Any = SimpleNamespace(shutdown=lambda: ended.append("drafter"))
            self._grammars: Any = SimpleNamespace(shutdown=lambda: ended.append("grammars"))

    with pytest.raises(RuntimeError, match="the device has failed"):
        Runner().shutdown()
    assert ended == ["drafter", "grammars", "vLLM"]


@pytest.mark.parametrize("sizes", [[], [0, 3, 1], [4]])
@pytest.mark.parametrize("has_grammar", [False, True])
def test_other_ranks_get_the_trees(sizes: list[int], has_grammar: bool) -> None:
    trees = [DraftTree.from_lists(range(n), [-1, *range(-1, n)][:n]) for n in sizes]
    from_proposer = np.arange(len(sizes)) % 2 == 0 if has_grammar else None
    ids = [str(i) for i in range(len(sizes))]
    sent = Drafts(ids, DraftForest.of(trees), np.arange(len(sizes)) + 7, from_proposer)
    received = pickle.loads(pickle.dumps(sent))
    assert received.req_ids == ids and received.num_tokens.tolist() == sent.num_tokens.tolist()
    for name in ("tokens", "parents", "depths", "firsts"):
        own, other = getattr(sent.forest, name), getattr(received.forest, name)
        assert own.tolist() == other.tolist() and own.dtype == other.dtype
        assert other.flags.writeable  # numba would compile kernels for read-only arrays
    expected = [True] * len(sizes) if from_proposer is None else from_proposer.tolist()
    assert received.from_proposer.tolist() == expected


@pytest.mark.parametrize("is_used_again", [False, True])
def test_no_tokens_and_choices_of_an_aborted_request_are_learned(is_used_again: bool) -> None:
    """Not even if a new request has its id and its row when they arrive."""
    learned: list[Any] = []
    awaited: list[Any] = []

    class Proposer(TestProposer):
        def plan(self, *args: Any) -> None:
            awaited.append(args[-1])

        def read(self, request_id: str, tokens: list[int]) -> None:
            learned.append((request_id, tokens))

    proposer = Proposer(LookaheadOptions())

    drafter: Any = SimpleNamespace(
        recorder=SimpleNamespace(drafting=lambda: nullcontext()),
        surviving=lambda task: nullcontext(),
        proposer=proposer,
        options=LookaheadOptions(),
        max_model_len=100,
        checked=lambda forest, max_nodes: forest,
        is_drafting_rank=True,
    )
    late = LateDrafts(drafter, GrammarCopies(None))  # type: ignore[arg-type]
    new: Any = SimpleNamespace(
        req_id="r",
        prompt_token_ids=[1, 2],
        prompt_is_token_ids=None,
        mm_features=[],
        prefill_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=9),
    )
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
    late.learn()
    late.add_step(launched())
    late.finish("r")
    if is_used_again:
        late.start(new)
    late.learn()
    assert (learned, awaited) == ([("r", [5])], [verified, None])


def test_tokens_of_steps_in_other_stages_of_a_pipeline_are_not_awaited() -> None:
    late = LateDrafts(SimpleNamespace(options=LookaheadOptions()), SimpleNamespace())  # type: ignore[arg-type]
    late._steps.extend(
        SimpleNamespace(requests=np.array(rows))  # type: ignore[misc]
        for rows in ([1, 2], [GONE], [3, 4], [5])
    )
    waiting_for = [late._num_later(np.array(rows)) for rows in ([5, 1], [1, 3], [2], [7], [])]
    assert waiting_for == [0, 1, 3, 4, 4]


def test_a_request_that_is_preempted_before_its_first_token_keeps_its_references(
    llama: Path,
) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0, detokenize=False)
    params.extra_args = {"lookahead_reference": [[7, 8, 9]]}
    with engine(llama, {"budget": 16}, max_num_batched_tokens=32) as llm:
        core = llm.llm_engine
        proposer: Any = drafter_of(llm).proposer
        references: list[int] = []
        start = proposer.start

        def watched(request_id: str, prompt: Any, namespace: Any, own: Any, *args: Any) -> None:
            references.append(len(own))
            start(request_id, prompt, namespace, own, *args)

        proposer.start = watched
        core.add_request("r", TokensPrompt(prompt_token_ids=list(range(2, 90))), params)
        core.step()
        assert core.reset_prefix_cache(reset_running_requests=True)
        while core.has_unfinished_requests():
            core.step()
        assert references == [1]


def test_no_choices_are_kept_for_an_ended_request(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has rows in the steps in flight, but its text has ended before them."""
    params = SamplingParams(max_tokens=40, temperature=1, seed=0, detokenize=False)
    params.stop_token_ids = list(range(0, 128, 8))
    remaining: list[int] = []
    add_step = LateDrafts.add_step

    def watched(self: LateDrafts, step: Step) -> None:
        arrays = self._requests.progress.arrays
        for req_id in () if step.verified is None else step.verified.request_ids:
            remaining.append(int(arrays.remaining[self._requests[req_id].row]))
        add_step(self, step)

    monkeypatch.setattr(LateDrafts, "add_step", watched)
    with engine(llama, {"proposer": "hybrid", "budget": 8}) as llm:
        generate(llm, random_prompts(12, 20), params)
    assert len(remaining) > 50 and min(remaining) > 0
