"""Every request option of vLLM's OpenAI server gives the same answer with and without lookahead.

The options are the fields of vLLM's request classes. An option that another release adds has no
sample here, and its test says so.
"""

import base64
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import requests
import torch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from benchmarks.serving.server import sum_of
from tests.support.http_answers import Answer, assembled, compared
from tests.support.models import save_tiny_model
from tests.support.servers import ANSWER_SECONDS, forked
from tests.support.tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

SERVING = (
    *("--dtype=float32", "--enforce-eager", "--max-model-len=512", "--served-model-name=m"),
    *("--kv-cache-memory-bytes=64M", "--max-num-seqs=8", "--scheduling-policy=priority"),
    *("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--enable-prompt-embeds"),
    *("--enable-prompt-tokens-details", "--trust-request-mm-kwargs"),
    *("--trust-request-chat-template", "--reasoning-config"),
    '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',
)
LOOKAHEAD = (
    *("--speculative-model=[lookahead]", "--num-speculative-tokens=6"),
    "--speculative-config.budget=6",  # fixed, so that slow machines draft too
)


class Sample(NamedTuple):
    """A value of an option, and the other options that it needs."""

    value: Any
    others: dict[str, Any]
    exact: bool = True
    """False: sampled without a seed, so that only the shapes of the answers are compared."""
    setup: dict[str, Any] | None = None
    """A request that is sent before."""


def of(value: Any, /, **others: Any) -> Sample:
    return Sample(value, others)


def unseeded(value: Any, /, **others: Any) -> Sample:
    return Sample(value, {**others, "ignore_eos": True}, exact=False)


def after(response: str, **others: Any) -> Sample:
    return Sample(response, others, setup={"request_id": response, "input": SHORT})


def embeddings() -> str:
    """A prompt of 8 vectors of the model's width, in base64."""
    file = io.BytesIO()
    torch.save(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), file)
    return base64.b64encode(file.getvalue()).decode()


# The samples: a list for each option, with values that vLLM accepts and some that it refuses.

SAMPLED = {"temperature": 0.8, "seed": 7}
COMMA, STOP, NEWLINE, AND = 19, 21, 5, 13  # of the tests' tokenizer
ALLOWED = [COMMA, STOP, NEWLINE, *range(72, 98)]
PROMPT = "The days of the week are Monday, Tuesday, Wednesday. Once more, the days of the week are"
TEXT = "Name three rivers, three times each."  # neither answer to it ends early
QUESTION = [{"role": "user", "content": TEXT}]
SHORT = [{"role": "user", "content": "Say yes."}]
OPEN_ENDED = [*SHORT, {"role": "assistant", "content": "Yes, yes,"}]
THINKING = [*QUESTION, {"role": "assistant", "content": "<think>Let me think about 7."}]
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
COUNT = {"role": "user", "content": [{"type": "text", "text": "Count to nine."}]}
DIALOGUE = [{"role": "system", "content": "You are brief."}, *OPEN_ENDED, COUNT]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} {{ suffix or '' }}"

AGES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ages": AGES},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
GRAMMAR = 'root ::= item (", " item){4}\nitem ::= "red" | "green" | "blue"'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<p>", "schema": SCHEMA, "end": "</p>"}],
    "triggers": ["<p>"],
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
FUNCTIONS = (
    {"name": "get_weather", "parameters": {**CITY, "required": ["city"]}},
    {"name": "get_time", "parameters": CITY},
)
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT_TOOLS = [{"type": "function", **function} for function in FUNCTIONS]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "(Paris|Rome)"}}</tool_call>'
# A grammar dictates a call, so that the parser finds one, and texts, so that stop strings occur.
CALLING = {"structured_outputs": {"regex": CALL.replace("{", r"\{").replace("}", r"\}")}}
DAYS = {"structured_outputs": {"regex": r"Monday, Tuesday, (Sun|Satur)day\. (yes|no){9}"}}

EVERYWHERE: dict[str, list[Any]] = {
    "model": [None, "no-such-model"],
    "temperature": [of(0.8, seed=7), unseeded(0.8), 0, of(1e-6, seed=7), of(1.5, seed=8), -1],
    "top_p": [of(0.5, **SAMPLED), 0.1, 2],
    "top_k": [of(5, **SAMPLED), of(1, **SAMPLED), of(0, **SAMPLED), 40, -2],
    "min_p": [of(0.1, **SAMPLED), 0.1, 1.5],
    "seed": [of(7, temperature=0.8), of(-7, temperature=0.8), 0, 2**64],
    "presence_penalty": [1.5, of(-1.5, **SAMPLED), 3],
    "frequency_penalty": [1.5, of(-1.5, **SAMPLED), -3],
    "repetition_penalty": [1.3, of(0.8, **SAMPLED), 0],
    "logit_bias": [{COMMA: -100, 80: 9}, of({AND: 5.5, NEWLINE: -2}, **SAMPLED), {"9999": 1}],
    "stop": [
        *(of("day, T", **DAYS), of(["y, Tues", "yes"], **DAYS), of(["no", "ye"], **DAYS)),
        *(list("abcde"), of(list("xyz"), **SAMPLED), [], [""]),
    ],
    # Not under a grammar: vLLM masks these tokens there, and a forced one ends the request.
    "stop_token_ids": [[*range(72, 85)], of([*range(72, 98)], **SAMPLED), ["a"]],
    "include_stop_str_in_output": [of(True, stop=["day, T"], **DAYS), True],
    "ignore_eos": [True, False],
    "skip_special_tokens": [of(False, ignore_eos=True), of(False, logit_bias={"0": 9})],
    "user": ["somebody", 1],
    "priority": [1, -1, "high"],
    "cache_salt": ["salt", ""],
    "request_id": [of("an-id", stream=False), of("another-id", stream=True)],
    "session_id": ["a-session"],
    "vllm_xargs": [
        *({"someone": "else's"}, {"lookahead_namespace": "n"}, {"lookahead_reference": [TEXT]}),
        *({"lookahead_enabled": 0}, {"nested": {"a": 1}}),
    ],
    "kv_transfer_params": [{}, {"a": 1}],
    "ec_transfer_params": [{}, {"a": 1}],
    "structured_outputs": [
        *({"json": SCHEMA}, of({"regex": "[a-f ]{20}"}, **SAMPLED), {"json_object": True}),
        *({"regex": r"(\d{2}-){4}\d{2}"}, of({"json": json.dumps(SCHEMA)}, **SAMPLED)),
        *({"choice": ["Monday", "Tuesday evening"]}, {"grammar": GRAMMAR}),
        *(of({"grammar": GRAMMAR}, **SAMPLED), {"structural_tag": json.dumps(TAG)}),
        *({"json": SCHEMA, "disable_any_whitespace": True}, {"regex": "("}, {"choice": []}),
        *({"json": SCHEMA, "disable_additional_properties": True}, {"regex": "a", "choice": ["a"]}),
        {"json": SCHEMA, "whitespace_pattern": " ?"},
    ],
    "watermarking": [True, of(True, **SAMPLED), False],
    "mm_payload": ["none", "some"],
    "return_mm_kwargs": [False, True],
    "stream": [True, False, of(True, **SAMPLED), "perhaps"],
    "stream_options": [of({"include_usage": True}, stream=True)],
}

BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 8}
CUT = {"truncate_prompt_tokens": 9}
GENERATING: dict[str, list[Any]] = {
    "n": [2, of(3, **SAMPLED), unseeded(2, temperature=0.8), 0],
    "use_beam_search": [of(True, n=2, max_tokens=8), of(True, n=1, max_tokens=8)],
    "length_penalty": [of(0.2, **BEAMS), of(3.0, **BEAMS)],
    "min_tokens": [of(20, stop=list("abcde")), of(20, stop_token_ids=ALLOWED), 99],
    "spaces_between_special_tokens": [of(False, skip_special_tokens=False, ignore_eos=True)],
    "truncate_prompt_tokens": [5, -1, of(5, **SAMPLED), 99999],
    "truncation_side": [of("right", **CUT), of("left", **CUT), of("top", **CUT)],
    "allowed_token_ids": [ALLOWED, of(ALLOWED, **SAMPLED), []],
    "prompt_logprobs": [0, 2, 21],
    "bad_words": [["a", "b"], of(["the", "="], **SAMPLED), [""]],
    "thinking_token_budget": [5, 0, -5],
    "add_special_tokens": [True, False],
    "response_format": [
        *({"type": "text"}, {"type": "json_object"}, JSON_SCHEMA, of(JSON_SCHEMA, **SAMPLED)),
        *(TAG, {"type": "json_schema"}, {"type": "xml"}),
    ],
    "return_token_ids": [True, of(True, n=2, **SAMPLED)],
    "routed_experts_prompt_start": [3, -1],
    "return_token_offsets": [True],
    "repetition_detection": [
        of({"max_pattern_size": 4, "min_count": 2}, repetition_penalty=0.5),
        {"max_pattern_size": 20, "min_pattern_size": 1, "min_count": 2},
        {"max_pattern_size": -1},
    ],
    "stream_interval": [of(4, stream=True), 4, 0],
    "stream_options": [
        of({"include_usage": True, "continuous_usage_stats": True}, stream=True),
        *(of({"include_usage": True}, stream=True), of({"include_usage": True}, stream=False)),
    ],
}


def brief(samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The first two samples of each option; another endpoint has all of them."""
    return {option: values[:2] for option, values in samples.items()}


IDS = [72, 73, 74, 72, 73, 74]
COMPLETIONS = EVERYWHERE | {
    **GENERATING,
    "prompt": [
        *(PROMPT, [PROMPT, "One, two, one,"], of([PROMPT, "One, two,"], n=2, **SAMPLED), IDS),
        *([IDS, IDS[:3]], "", [9999], None),
    ],
    "echo": [True, of(True, logprobs=2), of(True, max_tokens=0, logprobs=1)],
    "logprobs": [0, 5, of(3, **SAMPLED), of(2, min_tokens=5), of(2, n=2, **SAMPLED), 21],
    "prompt_logprobs": [*GENERATING["prompt_logprobs"], of(-1, prompt="two")],
    "max_tokens": [1, 64, None, 0, 100_000],
    "suffix": [".", ""],
    "logprob_token_ids": [
        *(of([COMMA, STOP], logprobs=1), of([AND], logprobs=1, **SAMPLED), [COMMA]),
    ],
    "prompt_embeds": [
        *(of(embeddings(), prompt=None), of([embeddings()], prompt=None, **SAMPLED)),
        of("nothing", prompt=None),
    ],
    "thinking_token_budget": [of(6, prompt="<think>"), of(6, prompt="<think>", **SAMPLED), 5, -5],
    "return_tokens_as_token_ids": [of(True, logprobs=2), True],
    "best_of": [of(2, n=1, **SAMPLED)],
}


def calls(tools: list[Any], named: dict[str, Any], nobody: dict[str, Any], limit: str) -> Any:
    """Samples of `tools` and `tool_choice`, in the form of an endpoint."""
    given = {"tools": tools, limit: 64}
    return {
        "tools": [tools, of(tools, **CALLING, **{limit: 64}), []],
        "tool_choice": [
            *(of("none", **given), of("auto", **given), of("auto", **given, **CALLING)),
            *(of("required", **given), of("required", **given, **SAMPLED)),
            *(of(named, **given), of(named, **given, **SAMPLED), of(nobody, **given)),
            *("auto", "required"),
        ],
        "parallel_tool_calls": [of(on, tool_choice="required", **given) for on in (False, True)],
    }


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


LOGPROBS: dict[str, Any] = {"logprobs": True}
PREDICTED = [{"type": "text", "text": "7 x 1 = 7"}]
CHAT = brief(EVERYWHERE | GENERATING) | {
    **calls(TOOLS, named("get_time"), named("no_such"), "max_tokens"),
    "messages": [QUESTION, DIALOGUE, SHORT, OPEN_ENDED, [], [{"content": "no role"}]],
    "logprobs": [True, False],
    "top_logprobs": [
        *(of(0, **LOGPROBS), of(4, **LOGPROBS), of(3, **LOGPROBS, **SAMPLED), 3),
        *(of(2, min_tokens=5, **LOGPROBS), of(2, n=2, **LOGPROBS, **SAMPLED), of(21, **LOGPROBS)),
    ],
    "logprob_token_ids": [
        *(of([COMMA, STOP], **LOGPROBS), of([AND], **LOGPROBS, top_logprobs=2, **SAMPLED)),
    ],
    "max_tokens": [1, 64, 100_000],
    "max_completion_tokens": [20, 0, 100_000],
    "reasoning_effort": ["low", "none", "much"],
    "thinking_token_budget": [
        *(of(12, messages=THINKING, **CONTINUED), 5, -5),
        of(12, messages=THINKING, **CONTINUED, **SAMPLED),
    ],
    "include_reasoning": [False, True],
    "echo": [True, of(True, messages=OPEN_ENDED, **CONTINUED), of(True, **LOGPROBS)],
    "add_generation_prompt": [False, True],
    "continue_final_message": [
        of(True, messages=OPEN_ENDED, add_generation_prompt=False),
        of(True, messages=OPEN_ENDED, add_generation_prompt=True),
    ],
    "documents": [[{"title": "Sevens", "text": "7, 14, 21"}], "a text"],
    "chat_template": [TEMPLATE, "{% for %}"],
    "chat_template_kwargs": [
        *(of({"suffix": "7 x 1 = 7\n"}, chat_template=TEMPLATE), {"enable_thinking": False}),
    ],
    "media_io_kwargs": [{"image": {}}, {"image": 1}],
    "mm_processor_kwargs": [{}, {"a": 1}],
    "return_tokens_as_token_ids": [of(True, **LOGPROBS, top_logprobs=2), True],
    "return_prompt_text": [True],
    # OpenAI's, which vLLM does not declare.
    "prediction": [
        {"type": "content", "content": "7 x 1 = 7\n7 x 2 = 14\n"},
        of({"type": "content", "content": PREDICTED}, **SAMPLED),
    ],
    "functions": [[FUNCTIONS[1]]],
    "web_search_options": [{}],
}

INCLUDED = {"include": ["message.output_text.logprobs"]}
TEXT_SCHEMA = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
FLAT_NOBODY = {"type": "function", "name": "no_such"}
RESPONSES = brief(EVERYWHERE) | {
    **calls(FLAT_TOOLS, {"type": "function", "name": "get_time"}, FLAT_NOBODY, "max_output_tokens"),
    "input": [TEXT, QUESTION, SHORT, OPEN_ENDED, "", 3],
    "background": [of(True, store=True), of(True, store=False), False],
    "include": [INCLUDED["include"], of(INCLUDED["include"], **SAMPLED), ["everything"]],
    "instructions": ["Answer in one line.", 7],
    "max_output_tokens": [1, 64, 0, 100_000],
    "max_tool_calls": [of(1, tools=FLAT_TOOLS), "one"],
    "metadata": [{"a": "b"}, {"a": 1}],
    "previous_response_id": [
        *(after("resp_a", stream=False), after("resp_b", stream=True)),
        *(after("resp_c", stream=False, **SAMPLED), "resp_of_nobody"),
    ],
    "prompt": [{"id": "pmpt_1"}],
    "reasoning": [{"effort": "low"}, {"effort": "none"}],
    "include_reasoning": [False, True],
    "service_tier": ["auto", "flex", "none"],
    "store": [True, False],
    "text": [
        *({"format": {"type": "text"}}, {"format": {"type": "json_object"}}, TEXT_SCHEMA),
        *(of(TEXT_SCHEMA, **SAMPLED), {"verbosity": "low"}, {"format": {"type": "json_schema"}}),
    ],
    "top_logprobs": [
        *(of(0, **INCLUDED), of(4, **INCLUDED), of(3, **INCLUDED, **SAMPLED)),
        *(3, of(21, **INCLUDED)),
    ],
    "truncation": ["auto", "disabled", "some"],
    "request_id": [of("resp_mine", stream=False), of("resp_streamed", stream=True)],
    "prompt_cache_key": ["a-key"],
    "media_io_kwargs": [{"image": {}}, {"image": 1}],
    "mm_processor_kwargs": [{}, {"a": 1}],
    "enable_response_messages": [True, of(True, **SAMPLED)],
    "previous_input_messages": [DIALOGUE[:1], "hello"],
    "chat_template_kwargs": [{"enable_thinking": False}, {"chat_template": TEMPLATE}],
    "stream_options": [of({"include_obfuscation": False}, stream=True)],
    "conversation": ["conv_1"],  # OpenAI's
}


class Endpoint(NamedTuple):
    """Of the server: vLLM's request class, what every request has, and samples by option."""

    protocol: Any
    base: dict[str, Any]
    samples: dict[str, list[Any]]


ENDPOINTS = {
    "completions": Endpoint(CompletionRequest, {"prompt": PROMPT, "max_tokens": 24}, COMPLETIONS),
    "chat/completions": Endpoint(
        ChatCompletionRequest, {"messages": QUESTION, "max_tokens": 24}, CHAT
    ),
    "responses": Endpoint(
        ResponsesRequest, {"input": QUESTION, "max_output_tokens": 24}, RESPONSES
    ),
}
OPTIONS = [
    (path, option)
    for path, endpoint in ENDPOINTS.items()
    for option in {**endpoint.protocol.model_fields, **endpoint.samples}
]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URLs of a plain server and of one with lookahead."""
    folder = tmp_path_factory.mktemp("parity")
    model = save_tokenizer(save_tiny_model("llama", folder))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")

        def start(name: str, *flags: str) -> str:
            return stack.enter_context(forked(model, folder / f"{name}.log", *SERVING, *flags)).url

        with ThreadPoolExecutor(2) as pool:
            plain = pool.submit(start, "plain")
            lookahead = pool.submit(start, "lookahead", *LOOKAHEAD)
        yield [plain.result(), lookahead.result()]


def ask(url: str, path: str, body: dict[str, Any]) -> Answer:
    """Send a request and wait for its whole answer; of a background request, until it is there."""
    try:
        response = requests.post(f"{url}/v1/{path}", json=body, timeout=ANSWER_SECONDS)
    except requests.exceptions.ChunkedEncodingError:
        # vLLM refuses some requests in this way, after their stream has begun.
        return Answer(200, None, "the connection broke inside the stream")
    if not response.ok:
        return Answer(response.status_code, None, response.json())
    if body.get("stream"):
        lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        errors = [chunk["error"] for chunk in chunks if "error" in chunk]
        return Answer(200, assembled([c for c in chunks if "error" not in c]), errors or None)
    content = response.json()
    while content.get("status") in ("queued", "in_progress"):
        time.sleep(0.1)
        content = requests.get(f"{url}/v1/{path}/{content['id']}", timeout=ANSWER_SECONDS).json()
    return Answer(200, content)


def bodies(path: str, option: str) -> Iterator[tuple[dict[str, Any], Sample]]:
    """The requests of an option, each in one piece and streamed, unless it says how."""
    endpoint = ENDPOINTS[path]
    for given in endpoint.samples[option]:
        sample = given if isinstance(given, Sample) else of(given)
        body = {"model": "m", "temperature": 0, **endpoint.base, **sample.others}
        body[option] = sample.value
        streams = [{}] if "stream" in body else [{"stream": False}, {"stream": True}]
        yield from (({**body, **stream}, sample) for stream in streams)


@pytest.mark.parametrize(("path", "option"), OPTIONS)
def test_an_option_gives_the_same_answer(urls, path, option):
    assert ENDPOINTS[path].samples.get(option), f"vLLM has an option {option}: add samples of it"

    def differences(body: dict[str, Any], sample: Sample) -> list[str]:
        if sample.setup:
            for url in urls:
                ask(url, path, {"model": "m", "temperature": 0, **sample.setup})
        plain, ours = pool.map(lambda url: ask(url, path, body), urls)
        if option == "prediction" and ours.content and ours.content.get("usage"):  # ours says more
            details = ours.content["usage"].pop("completion_tokens_details")
            plain.content["usage"].pop("completion_tokens_details", None)
            assert {f"{kind}_prediction_tokens" for kind in ("accepted", "rejected")} < {*details}
        verdict, places = compared(plain, ours, sample.exact)
        if verdict == "differs" and sample.exact:  # a near tie, if plain vLLM says it alone
            verdict, _ = compared(ask(urls[0], path, body), ours)
        return [f"{json.dumps(body)}: {place}" for place in places if verdict == "differs"]

    with ThreadPoolExecutor(64) as pool, ThreadPoolExecutor(32) as comparisons:
        found = comparisons.map(lambda each: differences(*each), bodies(path, option))
        assert [place for places in found for place in places] == []


def test_drafts_are_accepted(urls):
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 99, "temperature": 0, "ignore_eos": True}
    for url in (*urls, *urls):  # the second time, the trie has the answer
        ask(url, "completions", body)
    plain, ours = (requests.get(f"{url}/metrics", timeout=ANSWER_SECONDS).text for url in urls)
    assert not sum_of(plain, "vllm:spec_decode_num_(?:draft|accepted)_tokens_total")
    assert sum_of(ours, "vllm:spec_decode_num_accepted_tokens_total") > 50


# The comparison itself.

COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "choices": [
        {
            "text": " a b",
            "finish_reason": "length",
            "logprobs": {"top_logprobs": [{" a": -0.1, " c": -2.5}, {" b": -0.2, " d": -3.0}]},
        }
    ],
    "usage": {"completion_tokens": 2},
}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("choices/0/text", " a c", "differs"),
        ("choices/0/finish_reason", None, "differs"),
        ("choices/0/logprobs/top_logprobs/1", {" b": -0.2, " d": -3.1}, "differs"),
        ("choices/0/logprobs/top_logprobs/1", {" b": -0.2, " e": -3.0004}, "equal"),  # a tie
        ("choices", [], "differs"),
        ("usage/completion_tokens", 3, "differs"),
        ("id", "cmpl-2", "equal"),
    ],
)
def test_a_planted_difference_is_found(path, value, expected):
    other = deepcopy(COMPLETION)
    place: Any = other
    *parents, last = (int(step) if step.isdecimal() else step for step in path.split("/"))
    for step in parents:
        place = place[step]
    place[last] = value
    plain, ours = Answer(200, COMPLETION), Answer(200, other)
    assert compared(plain, ours)[0] == compared(ours, plain)[0] == expected
