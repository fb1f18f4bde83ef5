"""The comparison covers every option, and finds every difference."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.request_parity.answers import Answer, assembled, compared
from benchmarks.request_parity.endpoint import Endpoint, SampleError, of
from benchmarks.request_parity.samples import SAMPLED, endpoints

ENDPOINTS = {endpoint.name: endpoint for endpoint in endpoints()}


# ---- the samples --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_option_that_vllm_declares_has_samples(name: str) -> None:
    endpoint = ENDPOINTS[name]
    assert set(endpoint.options()) >= set(endpoint.fields())
    for option, samples in endpoint.samples.items():
        labels = [str(sample) for sample in samples]
        assert len({*labels}) == len(labels), (option, labels)


def test_an_option_without_a_sample_is_an_error() -> None:
    endpoint = ENDPOINTS["completions"]
    samples = {k: v for k, v in endpoint.samples.items() if k != "top_k"}
    with pytest.raises(SampleError, match="no sample for option top_k of endpoint completions"):
        replace(endpoint, samples=samples).options()


def test_a_sample_overrides_the_base_of_its_request() -> None:
    endpoint = Endpoint("e", "m", "p", {"temperature": 0, "n": 1}, {})
    body = endpoint.body("n", of(2, **SAMPLED), streamed=True)
    assert body == {"temperature": 0.8, "seed": 7, "n": 2, "stream": True}
    assert endpoint.stream_modes("n", of(2)) == (False, True)
    assert endpoint.stream_modes("stream", of(False)) == (False,)
    assert endpoint.stream_modes("stream_options", of({}, stream=True)) == (True,)


# ---- the comparison -----------------------------------------------------------------------------

COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "created": 1,
    "choices": [
        {
            "index": 0,
            "text": " a b",
            "token_ids": [5, 6],
            "finish_reason": "length",
            "logprobs": {
                "token_logprobs": [-0.1, -0.2],
                "top_logprobs": [{" a": -0.1, " c": -2.5}, {" b": -0.2, " d": -3.0}],
            },
            "prompt_logprobs": [None, {"7": {"logprob": -1.5, "rank": 2, "decoded_token": "x"}}],
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
CHAT_LOGPROBS: dict[str, Any] = {
    "content": [
        {
            "token": "a",
            "logprob": -0.1,
            "top_logprobs": [
                {"token": "a", "logprob": -0.1, "bytes": [97]},
                {"token": "b", "logprob": -2.0, "bytes": [98]},
            ],
        }
    ]
}


def planted(whole: Any, path: str, value: Any) -> Any:
    """A copy of `whole` with `value` at `path`, or without that path if `value` is `...`."""
    result = deepcopy(whole)
    place: Any = result
    *parents, last = path.split("/")
    for step in parents:
        place = place[int(step) if isinstance(place, list) else step]
    key: Any = int(last) if isinstance(place, list) else last
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return result


def verdict_of(plain: Any, ours: Any, exact: bool = True) -> str:
    return compared(Answer(200, plain), Answer(200, ours), exact)[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("choices/0/text", " a c"),
        ("choices/0/token_ids/1", 7),
        ("choices/0/token_ids", [5]),
        ("choices/0/finish_reason", "stop"),
        ("choices/0/finish_reason", ...),
        ("choices/0/stop_reason", None),
        ("choices/0/logprobs", None),
        ("choices/0/logprobs/token_logprobs/1", -0.21),
        ("choices/0/logprobs/token_logprobs/1", float("nan")),
        ("choices/0/logprobs/top_logprobs/1", {" b": -0.2}),
        ("choices/0/logprobs/top_logprobs/1", {" b": -0.2, " e": -2.9}),
        ("choices/0/logprobs/top_logprobs/1", {" b": -0.2, " d": -3.1}),
        ("choices/0/logprobs/top_logprobs", [{" a": -0.1, " c": -2.5}]),
        ("choices/0/logprobs/top_logprobs", None),
        ("choices/0/prompt_logprobs/1/7/logprob", -1.6),
        ("choices/0/prompt_logprobs/1/7/decoded_token", "y"),
        ("usage/completion_tokens", 3),
        ("usage/completion_tokens", True),
        ("choices", []),
    ],
)
def test_a_planted_difference_is_found(path: str, value: Any) -> None:
    verdict, places = compared(
        Answer(200, COMPLETION), Answer(200, planted(COMPLETION, path, value))
    )
    assert verdict == "differs"
    assert any(place.startswith("content." + path.split("/")[0]) for place in places)
    assert verdict_of(planted(COMPLETION, path, value), COMPLETION) == "differs"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "cmpl-2"),
        ("created", 2),
        ("choices/0/logprobs/token_logprobs/1", -0.2001),
        # Another token with almost the same logprob.
        ("choices/0/logprobs/top_logprobs/1", {" b": -0.2, " e": -3.0004}),
        ("choices/0/prompt_logprobs/1/7/rank", 3),
    ],
)
def test_differences_of_plain_vllm_itself_do_not_count(path: str, value: Any) -> None:
    assert verdict_of(COMPLETION, planted(COMPLETION, path, value)) == "equal"
    assert verdict_of(planted(COMPLETION, path, value), COMPLETION) == "equal"


def test_alternatives_of_a_chat_may_be_swapped_only_in_a_near_tie() -> None:
    other = "content/0/top_logprobs/1"
    tie = planted(CHAT_LOGPROBS, other, {"token": "c", "logprob": -2.0003, "bytes": [99]})
    assert verdict_of(CHAT_LOGPROBS, tie) == "equal"
    apart = planted(CHAT_LOGPROBS, other, {"token": "c", "logprob": -1.9, "bytes": [99]})
    assert verdict_of(CHAT_LOGPROBS, apart) == "differs"


def test_equal_refusals_have_the_same_status_and_error() -> None:
    error = {"message": "top_p must be in (0, 1]", "type": "BadRequestError", "code": 400}
    refused = Answer(400, error=error)
    assert compared(refused, Answer(400, error=dict(error)))[0] == "refused by both"
    for other in (
        Answer(200, COMPLETION),
        Answer(500, error=error),
        Answer(200, error=error),
        Answer(400, error={**error, "message": "not supported with speculative decoding"}),
    ):
        for exact in (True, False):
            assert compared(refused, other, exact)[0] == "differs"
            assert compared(other, refused, exact)[0] == "differs"


def test_unseeded_answers_are_compared_in_their_fields() -> None:
    other = planted(COMPLETION, "choices/0/text", "else")
    assert verdict_of(COMPLETION, other, exact=False) == "equal"
    assert (
        verdict_of(COMPLETION, planted(other, "choices/0/logprobs", ...), exact=False) == "differs"
    )
    assert verdict_of(COMPLETION, planted(other, "choices", []), exact=False) == "differs"


# ---- streams ------------------------------------------------------------------------------------


def chunk(index: int, text: str, ids: list[int], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": index, "text": text, "token_ids": ids, "finish_reason": reason}
    return {"id": "cmpl-1", "choices": [choice], "usage": None}


def test_the_chunks_of_a_stream_are_joined() -> None:
    usage = {"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 5}}
    one_by_one = [
        *(chunk(0, " a", [5]), chunk(1, " x", [8]), chunk(0, " b", [6])),
        *(chunk(0, " c", [7], "length"), chunk(1, " y", [9], "stop"), usage),
    ]
    in_bursts = [
        *(chunk(1, " x y", [8, 9], "stop"), chunk(0, " a", [5])),
        *(chunk(0, " b c", [6, 7], "length"), usage),
    ]
    whole = assembled(one_by_one)
    assert [choice["text"] for choice in whole["choices"]] == [" a b c", " x y"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"]
    assert verdict_of(whole, assembled(in_bursts)) == "equal"
    in_bursts[2]["choices"][0]["text"] = " b d"
    assert verdict_of(whole, assembled(in_bursts)) == "differs"


def test_tool_calls_of_a_stream_are_joined() -> None:
    def delta(name: str | None, arguments: str) -> dict[str, Any]:
        call = {"index": 0, "function": {"name": name, "arguments": arguments}}
        return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    whole = assembled([delta("get_time", ""), delta(None, '{"ci'), delta(None, 'ty": "Rome"}')])
    (call,) = whole["choices"][0]["delta"]["tool_calls"]
    assert call["function"] == {"name": "get_time", "arguments": '{"city": "Rome"}'}


def test_events_of_responses_are_joined() -> None:
    def events(*deltas: str) -> list[dict[str, Any]]:
        kinds = [("response.output_text.delta", {"delta": d, "logprobs": [d]}) for d in deltas]
        kinds = [("response.created", {}), *kinds, ("response.completed", {"response": {}})]
        return [{"type": t, "sequence_number": i, **e} for i, (t, e) in enumerate(kinds)]

    plain = assembled(events("a", "b", "c"))
    assert [event["type"].rpartition(".")[2] for event in plain] == [
        "created",
        "delta",
        "completed",
    ]
    assert plain[1]["delta"] == "abc" and plain[1]["logprobs"] == ["a", "b", "c"]
    ours = assembled(events("ab", "c"))
    assert verdict_of(plain, planted(ours, "1/logprobs", ["a", "b", "c"])) == "equal"
    assert verdict_of(plain, assembled(events("ab", "d"))) == "differs"
