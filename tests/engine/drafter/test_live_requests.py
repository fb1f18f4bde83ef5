"""What a worker keeps of its live requests, without an engine."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from lookahead_vllm.engine.drafter.live_requests import LiveRequests
from lookahead_vllm.options import request as request_options
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.proposers import Recorder


def requests_of(reads_reasoning: bool = False) -> LiveRequests:
    drafter: Any = SimpleNamespace(
        is_drafting_rank=True,
        reads_reasoning=reads_reasoning,
        proposer=Recorder(LookaheadOptions()),
        surviving=lambda task: nullcontext(),
        max_model_len=100,
    )
    grammars: Any = SimpleNamespace(start=lambda new: None, finish=lambda req_id: None)
    return LiveRequests(drafter, grammars)


def new(num_tokens: int, params: SamplingParams) -> Any:
    """A request "r" with a prompt of so many tokens."""
    return SimpleNamespace(
        req_id="r",
        prompt_token_ids=[1] * num_tokens,
        prompt_len=num_tokens,
        prompt_is_token_ids=None,
        mm_features=[],
        prefill_token_ids=[1] * num_tokens,
        sampling_params=params,
    )


@pytest.mark.parametrize(("num_tokens", "nodes"), [(1000, 64), (1 << 15, 16), (1 << 17, 4)])
def test_where_vllm_reads_the_reasoning_at_each_node_long_texts_get_small_trees(num_tokens, nodes):
    grammar = StructuredOutputsParams(regex="a+")
    for structured, reads_reasoning, expected in (
        (grammar, True, nodes),
        (grammar, False, 64),
        (None, True, 64),
    ):
        requests = requests_of(reads_reasoning)
        requests.start(new(num_tokens, SamplingParams(structured_outputs=structured)))
        assert requests.most_nodes("r", 64) == expected


def test_a_request_that_returns_before_its_first_token_keeps_its_references():
    """The scheduler sends them once; a preempted request comes again without them."""
    requests = requests_of()
    options = request_options.RequestOptions(references=(np.array([7, 8], np.int32).tobytes(),))
    first = SamplingParams(extra_args=request_options.fields_for_worker(None, options))
    requests.start(new(2, first))
    requests.start(new(2, request_options.without_references(first)))
    Recorder.STARTED.clear()
    requests.follow(["other", "r"])
    ((prompt, _, references),) = Recorder.STARTED
    assert (prompt, references) == ([1, 1], [[7, 8]])
    assert requests["r"].options is None  # references are long
    requests.follow(["r"])
    assert len(Recorder.STARTED) == 1


def test_a_longer_prompt_is_the_next_turn_of_a_session():
    requests = requests_of()
    requests.start(new(4, SamplingParams()))
    assert not requests.is_next_turn(new(9, SamplingParams()))  # it has no token yet
    requests.follow(["r"])
    assert requests.is_next_turn(new(9, SamplingParams()))
    assert not requests.is_next_turn(new(4, SamplingParams()))  # it was preempted
