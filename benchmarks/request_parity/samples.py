"""Values for every request option of vLLM's OpenAI server, good ones and bad ones.

The names of the options come from vLLM's own request classes: if another release adds an option,
the comparison stops with an error until it has a sample here.
"""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from typing import Any

from benchmarks.request_parity.endpoint import Endpoint, Sample, of, unseeded

# ---- parts of samples ---------------------------------------------------------------------------

SAMPLED = {"temperature": 0.8, "seed": 7}

# Tokens of SmolLM2 that occur in the answers.
COMMA, STOP, NEWLINE, AND = 28, 30, 198, 284
ALLOWED = [COMMA, STOP, NEWLINE, AND, 260, 827, 1296, 12397, 15083]

PROMPT = (
    "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. "
    "Once more, the days of the week are"
)
TABLE = "Write the multiplication table of 7, from 7 x 1 to 7 x 12, one line each."
QUESTION = [{"role": "user", "content": TABLE}]
SHORT = [{"role": "user", "content": "Say yes and nothing else."}]
OPEN_ENDED = [*SHORT, {"role": "assistant", "content": "Yes, yes,"}]
THINKING = [*QUESTION, {"role": "assistant", "content": "<think>Let me think about 7."}]
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
DIALOGUE = [
    {"role": "system", "content": "You are brief."},
    *OPEN_ENDED,
    {"role": "user", "content": [{"type": "text", "text": "Count to nine."}]},
]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} {{ suffix or '' }}"

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    },
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
WEATHER = {"name": "get_weather", "parameters": {**CITY, "required": ["city"]}}
CLOCK = {"name": "get_time", "parameters": CITY}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "(Paris|Rome)"}}</tool_call>'
# The grammar dictates a call, so that the parser finds one.
CALLING = {"structured_outputs": {"regex": CALL.replace("{", r"\{").replace("}", r"\}")}}
NAMED = {"type": "function", "function": {"name": "get_time"}}
FLAT_TOOLS = [{"type": "function", **function} for function in (WEATHER, CLOCK)]
FLAT_NAMED = {"type": "function", "name": "get_time"}


@cache
def embeddings() -> str:
    """A prompt of 8 vectors of SmolLM2's width, in base64; the same every time."""
    import torch

    rng = torch.Generator().manual_seed(0)
    file = io.BytesIO()
    torch.save(torch.randn(8, 576, generator=rng) / 10, file)
    return base64.b64encode(file.getvalue()).decode()


# ---- the samples --------------------------------------------------------------------------------


def everywhere() -> dict[str, list[Sample]]:
    """Options of all three endpoints."""
    return {
        "model": [of(None), of("no-such-model")],
        "temperature": [
            *(of(0), of(1e-6, seed=7), of(0.8, seed=7), of(1.5, seed=8)),
            *(unseeded(0.8), unseeded(None), of(-1), of("hot")),
        ],
        "top_p": [of(0.5, **SAMPLED), of(1, **SAMPLED), of(0.1), of(0), of(2)],
        "top_k": [of(5, **SAMPLED), of(1, **SAMPLED), of(0, **SAMPLED), of(40), of(-2)],
        "min_p": [of(0.1, **SAMPLED), of(0.1), of(1.5)],
        "seed": [of(7, temperature=0.8), of(-7, temperature=0.8), of(0), of(2**64)],
        "presence_penalty": [of(1.5), of(-1.5, **SAMPLED), of(3)],
        "frequency_penalty": [of(1.5), of(-1.5, **SAMPLED), of(-3)],
        "repetition_penalty": [of(1.3), of(0.8, **SAMPLED), of(0)],
        "logit_bias": [
            *(of({str(COMMA): -100}), of({str(AND): 5.5, str(NEWLINE): -2}, **SAMPLED)),
            *(of({"99999999": 1}), of({"and": 1})),
        ],
        "stop": [
            *(of("."), of(["day, Thurs", "= 28"]), of([" 4", " Fri"], **SAMPLED), of([])),
            *(of(list("abcde")), of([""]), of(3)),
        ],
        "stop_token_ids": [of([STOP]), of([NEWLINE, AND], **SAMPLED), of([-1]), of(["a"])],
        "include_stop_str_in_output": [of(True, stop=["day, Thurs", "= 28"]), of(True)],
        "ignore_eos": [of(True), of(False)],
        "skip_special_tokens": [of(False, ignore_eos=True), of(False)],
        "user": [of("somebody"), of(1)],
        "priority": [of(1), of(-1), of("high")],
        "cache_salt": [of("salt"), of(""), of("a/b")],
        "request_id": [of("an-id", stream=False), of("another-id", stream=True)],
        "session_id": [of("a-session")],
        "vllm_xargs": [
            *(of({"someone": "else's"}), of({"lookahead_namespace": "n"})),
            *(of({"lookahead_reference": [TABLE]}), of({"lookahead_enabled": 0})),
            of({"nested": {"a": 1}}),
        ],
        "kv_transfer_params": [of({}), of({"a": 1})],
        "ec_transfer_params": [of({}), of({"a": 1})],
        "structured_outputs": [
            *(of({"json": SCHEMA}), of({"json": json.dumps(SCHEMA)}, **SAMPLED)),
            *(of({"regex": r"(\d{2}-){4}\d{2}"}), of({"regex": "[a-f ]{20}"}, **SAMPLED)),
            *(of({"choice": ["Monday", "Tuesday evening"]}), of({"grammar": GRAMMAR})),
            of({"grammar": GRAMMAR}, **SAMPLED),
            *(of({"json_object": True}), of({"structural_tag": json.dumps(TAG)})),
            of({"json": SCHEMA, "disable_any_whitespace": True}),
            of({"json": SCHEMA, "disable_additional_properties": True}),
            of({"json": SCHEMA, "whitespace_pattern": " ?"}),
            *(of({}), of({"regex": "("}), of({"choice": []}), of({"regex": "a", "choice": ["a"]})),
            *(of({"grammar": "root ::="}), of({"json": {"type": "nothing"}})),
        ],
        "watermarking": [of(True), of(True, **SAMPLED), of(False)],
        "mm_payload": [of("none"), of("some")],
        "return_mm_kwargs": [of(False), of(True)],
        "stream": [of(True), of(False), of(True, **SAMPLED), of("perhaps")],
        "stream_options": [of({"include_usage": True}, stream=True)],
    }


def generating() -> dict[str, list[Sample]]:
    """Options of Completions and Chat Completions."""
    beams = {"use_beam_search": True, "n": 2, "max_tokens": 8}
    return {
        "n": [of(2), of(3, **SAMPLED), unseeded(2, temperature=0.8), of(0)],
        "use_beam_search": [of(True, n=2, max_tokens=8), of(True, n=1, max_tokens=8)],
        "length_penalty": [of(0.2, **beams), of(3.0, **beams)],
        "min_tokens": [of(20, stop=["."]), of(20, stop_token_ids=[COMMA]), of(99), of(-1)],
        "spaces_between_special_tokens": [of(False, skip_special_tokens=False, ignore_eos=True)],
        "truncate_prompt_tokens": [of(5), of(-1), of(5, **SAMPLED), of(-2), of(99999)],
        "truncation_side": [
            of("right", truncate_prompt_tokens=9),
            of("left", truncate_prompt_tokens=9),
            of("top", truncate_prompt_tokens=9),
        ],
        "allowed_token_ids": [of(ALLOWED), of(ALLOWED, **SAMPLED), of([]), of([99999999])],
        "prompt_logprobs": [of(0), of(2), of(-1, prompt="two"), of(21), of(-2), of("two")],
        "bad_words": [of([" Wednesday", "7"]), of(["Sunday. Once", "="], **SAMPLED), of([""])],
        "thinking_token_budget": [of(5), of(0), of(-1), of(-5), of("long")],
        "add_special_tokens": [of(True), of(False)],
        "response_format": [
            *(of({"type": "text"}), of({"type": "json_object"}), of(JSON_SCHEMA), of(TAG)),
            of(JSON_SCHEMA, **SAMPLED),
            *(of({"type": "json_schema"}), of({"type": "xml"})),
            of({"type": "structural_tag", "structures": [], "triggers": 1}),
        ],
        "return_token_ids": [of(True), of(True, n=2, **SAMPLED)],
        "routed_experts_prompt_start": [of(3), of(-1)],
        "return_token_offsets": [of(True)],
        "repetition_detection": [
            of({"max_pattern_size": 4, "min_count": 2}, repetition_penalty=0.5),
            of({"max_pattern_size": 20, "min_pattern_size": 1, "min_count": 2}),
            *(of({"max_pattern_size": 4, "min_count": 1}), of({"max_pattern_size": -1})),
        ],
        "stream_interval": [of(4, stream=True), of(4), of(0)],
        "stream_options": [
            of({"include_usage": True}, stream=True),
            of({"include_usage": True, "continuous_usage_stats": True}, stream=True),
            *(of({"include_usage": True}, stream=False), of(7, stream=True)),
        ],
    }


def completions() -> dict[str, list[Sample]]:
    """Options of Completions."""
    ids = [504, 2029, 282, 260, 2322, 359]
    many = ["Red, green, blue, red, green,", "One, two, three, one, two,"]
    return {
        **everywhere(),
        **generating(),
        "prompt": [
            *(of(PROMPT), of(many), of(many, n=2, **SAMPLED), of(ids), of([ids, ids[:3]])),
            *(of(""), of([]), of(None), of([99999999]), of([-1]), of({"a": 1})),
        ],
        "echo": [of(True), of(True, logprobs=2), of(True, max_tokens=0, logprobs=1)],
        "logprobs": [
            *(of(0), of(5), of(3, **SAMPLED), of(2, min_tokens=5), of(2, n=2, **SAMPLED)),
            *(of(-1, max_tokens=2), of(21), of(-2), of("two")),
        ],
        "max_tokens": [of(1), of(64), of(None), of(0), of(-1), of(100_000)],
        "suffix": [of("."), of("")],
        "logprob_token_ids": [
            *(of([COMMA, STOP], logprobs=1), of([AND], logprobs=1, **SAMPLED)),
            *(of([COMMA]), of([99999999], logprobs=1)),
        ],
        "prompt_embeds": [
            *(of(embeddings(), prompt=None), of([embeddings()], prompt=None, **SAMPLED)),
            of("nothing", prompt=None),
        ],
        "thinking_token_budget": [
            *(of(6, prompt="<think>"), of(6, prompt="<think>", **SAMPLED)),
            *generating()["thinking_token_budget"],
        ],
        "return_tokens_as_token_ids": [of(True, logprobs=2), of(True)],
        "best_of": [of(2, n=1, **SAMPLED)],
    }


def chat() -> dict[str, list[Sample]]:
    """Options of Chat Completions."""
    tools = {"tools": TOOLS, "max_tokens": 64}
    generates = generating()
    generates["prompt_logprobs"] = [s for s in generates["prompt_logprobs"] if not s.others]
    return {
        **everywhere(),
        **generates,
        "messages": [
            *(of(QUESTION), of(DIALOGUE), of(SHORT), of(OPEN_ENDED)),
            *(of([]), of("hello"), of([{"role": "user"}]), of([{"content": "no role"}])),
        ],
        "logprobs": [of(True), of(False), of("yes")],
        "top_logprobs": [
            *(of(0, logprobs=True), of(4, logprobs=True), of(3, logprobs=True, **SAMPLED)),
            *(of(2, logprobs=True, min_tokens=5), of(2, logprobs=True, n=2, **SAMPLED)),
            *(of(3), of(21, logprobs=True), of(-2, logprobs=True), of("two", logprobs=True)),
        ],
        "logprob_token_ids": [
            of([COMMA, STOP], logprobs=True),
            of([AND], logprobs=True, top_logprobs=2, **SAMPLED),
            of([COMMA]),
            of([99999999], logprobs=True),
        ],
        "max_tokens": [of(1), of(64), of(-1), of(100_000)],
        "max_completion_tokens": [of(20), of(0), of(-1), of(100_000)],
        "ignore_eos": [of(True, messages=SHORT)],
        "skip_special_tokens": [of(False, messages=SHORT, ignore_eos=True)],
        "tools": [of(TOOLS), of(TOOLS, **CALLING, max_tokens=64), of([]), of([{"type": "f"}])],
        "tool_choice": [
            of("none", **tools),
            *(of("auto", **tools), of("auto", **tools, **CALLING)),
            *(of("required", **tools), of("required", **tools, **SAMPLED)),
            *(of(NAMED, **tools), of(NAMED, **tools, **SAMPLED)),
            *(of("auto"), of("perhaps", **tools)),
            of({"type": "function", "function": {"name": "no_such"}}, **tools),
        ],
        "parallel_tool_calls": [
            of(False, tool_choice="required", **tools),
            of(True, tool_choice="required", **tools),
        ],
        "reasoning_effort": [of("low"), of("none"), of("much")],
        "thinking_token_budget": [
            of(12, messages=THINKING, **CONTINUED),
            of(12, messages=THINKING, **CONTINUED, **SAMPLED),
            *generating()["thinking_token_budget"],
        ],
        "include_reasoning": [of(False), of(True)],
        "echo": [
            *(of(True), of(True, messages=OPEN_ENDED, **CONTINUED)),
            of(True, logprobs=True, top_logprobs=2),
        ],
        "add_generation_prompt": [of(False), of(True)],
        "continue_final_message": [
            of(True, messages=OPEN_ENDED, add_generation_prompt=False),
            of(True, messages=OPEN_ENDED, add_generation_prompt=True),
            of(True, messages=[], add_generation_prompt=False),
        ],
        "documents": [of([{"title": "Sevens", "text": "7, 14, 21"}]), of("a text")],
        "chat_template": [of(TEMPLATE), of("{% for %}")],
        "chat_template_kwargs": [
            of({"suffix": "7 x 1 = 7\n"}, chat_template=TEMPLATE),
            *(of({"enable_thinking": False}), of({"chat_template": TEMPLATE})),
        ],
        "media_io_kwargs": [of({"image": {}}), of({"image": 1})],
        "mm_processor_kwargs": [of({}), of({"a": 1})],
        "return_tokens_as_token_ids": [of(True, logprobs=True, top_logprobs=2), of(True)],
        "return_prompt_text": [of(True)],
        **openai_chat(),
    }


def openai_chat() -> dict[str, list[Sample]]:
    """Options of OpenAI's Chat Completions that vLLM does not declare."""
    return {
        "prediction": [
            of({"type": "content", "content": "7 x 1 = 7\n7 x 2 = 14\n7 x 3 = 21\n"}),
            of({"type": "content", "content": [{"type": "text", "text": "7 x 1 = 7"}]}, **SAMPLED),
        ],
        "metadata": [of({"a": "b"})],
        "store": [of(True), of(False)],
        "service_tier": [of("auto")],
        "modalities": [of(["text"])],
        "verbosity": [of("low")],
        "functions": [of([CLOCK])],
        "function_call": [of("auto", functions=[CLOCK])],
        "prompt_cache_key": [of("a-key")],
        "safety_identifier": [of("somebody")],
        "web_search_options": [of({})],
    }


def responses() -> dict[str, list[Sample]]:
    """Options of Responses."""
    tools = {"tools": FLAT_TOOLS, "max_output_tokens": 64}
    logprobs = {"include": ["message.output_text.logprobs"]}

    def after(response: str, **others: Any) -> Sample:
        return Sample(response, others, setup={"request_id": response, "input": SHORT})

    return {
        **everywhere(),
        "input": [
            *(of(TABLE), of(QUESTION), of(SHORT), of(OPEN_ENDED)),
            *(of(""), of([]), of(3), of([{"role": "nobody", "content": "a"}])),
        ],
        "background": [of(True, store=True), of(True, store=False), of(False)],
        "include": [
            *(of(logprobs["include"]), of(logprobs["include"], **SAMPLED)),
            *(of(["reasoning.encrypted_content"]), of(["everything"])),
        ],
        "instructions": [of("Answer in one line."), of(7)],
        "max_output_tokens": [of(1), of(64), of(0), of(-1), of(100_000)],
        "max_tool_calls": [of(1, **tools), of("one")],
        "metadata": [of({"a": "b"}), of({"a": 1})],
        "parallel_tool_calls": [of(False, tool_choice="required", **tools), of(True)],
        "previous_response_id": [
            after("resp_a", stream=False),
            after("resp_b", stream=True),
            after("resp_c", stream=False, **SAMPLED),
            of("resp_of_nobody"),
        ],
        "prompt": [of({"id": "pmpt_1"})],
        "reasoning": [of({"effort": "low"}), of({"effort": "none"}), of({"effort": "much"})],
        "include_reasoning": [of(False), of(True)],
        "service_tier": [of("auto"), of("flex"), of("none")],
        "store": [of(True), of(False)],
        "text": [
            of({"format": {"type": "text"}}),
            of({"format": {"type": "json_object"}}),
            of({"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}),
            of({"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}, **SAMPLED),
            of({"verbosity": "low"}),
            of({"format": {"type": "json_schema"}}),
        ],
        "tool_choice": [
            of("none", **tools),
            *(of("auto", **tools), of("auto", **tools, **CALLING)),
            *(of("required", **tools), of("required", **tools, **SAMPLED)),
            *(of(FLAT_NAMED, **tools), of(FLAT_NAMED, **tools, **SAMPLED)),
            *(of("required"), of({"type": "function", "name": "no_such"}, **tools)),
        ],
        "tools": [of(FLAT_TOOLS), of(FLAT_TOOLS, **CALLING, max_output_tokens=64), of([])],
        "top_logprobs": [
            *(of(0, **logprobs), of(4, **logprobs), of(3, **logprobs, **SAMPLED)),
            *(of(3), of(21, **logprobs), of(-2, **logprobs), of("two", **logprobs)),
        ],
        "truncation": [of("auto"), of("disabled"), of("some")],
        "ignore_eos": [of(True, input=SHORT)],
        "skip_special_tokens": [of(False, input=SHORT, ignore_eos=True)],
        "prompt_cache_key": [of("a-key")],
        "request_id": [of("resp_mine", stream=False), of("resp_streamed", stream=True)],
        "media_io_kwargs": [of({"image": {}}), of({"image": 1})],
        "mm_processor_kwargs": [of({}), of({"a": 1})],
        "enable_response_messages": [of(True), of(True, **SAMPLED)],
        "previous_input_messages": [of(DIALOGUE[:1]), of("hello")],
        "chat_template_kwargs": [of({"enable_thinking": False}), of({"chat_template": TEMPLATE})],
        # OpenAI's, which vLLM does not declare.
        "conversation": [of("conv_1")],
        "safety_identifier": [of("somebody")],
        "stream_options": [of({"include_obfuscation": False}, stream=True)],
    }


def endpoints() -> list[Endpoint]:
    """All endpoints. Unless a sample says otherwise, a request asks greedily for 24 tokens."""
    openai = "vllm.entrypoints.openai"
    greedy = {"temperature": 0, "max_tokens": 24}
    return [
        Endpoint(
            "completions",
            "completions",
            f"{openai}.completion.protocol:CompletionRequest",
            {"prompt": PROMPT, **greedy},
            completions(),
        ),
        Endpoint(
            "chat/completions",
            "chat.completions",
            f"{openai}.chat_completion.protocol:ChatCompletionRequest",
            {"messages": QUESTION, **greedy},
            chat(),
        ),
        Endpoint(
            "responses",
            "responses",
            f"{openai}.responses.protocol:ResponsesRequest",
            {"input": QUESTION, "temperature": 0, "max_output_tokens": 24},
            responses(),
        ),
    ]
