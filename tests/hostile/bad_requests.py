"""Requests that a server must refuse, or answer like ordinary ones.

Values are JSON texts, because `json` cannot write some of them, such as a hundred thousand
brackets, NaN or a lone surrogate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

Expected = Literal["refused", "answered", "either"]
"""A status of 400 to 499, of 200, or one of these."""

VOCAB = 128
MODEL = "m"
MAX_NAMESPACE = 1024
MAX_REFERENCES = 64
MAX_TOKENS = 16_384
"""Of a request's references. A text counts as one token for every 4 bytes of UTF-8, rounded up."""


@dataclass(frozen=True)
class Request:
    """A request, and the expected response of a server with lookahead."""

    name: str
    """What is wrong with it."""
    path: str
    body: bytes
    """Not always valid JSON."""
    expected: Expected = "refused"

    def without_lookahead(self) -> Request:
        """The request with names that no server knows in place of lookahead's fields."""
        body = self.body.replace(b"lookahead", b"lookabout").replace(b"prediction", b"predictiom")
        return replace(self, body=body)


# ---- the endpoints -------------------------------------------------------------------------------

XARGS = "@xargs"
PREDICTION = "@prediction"


def _body(fields: dict[str, Any], **raw: str) -> bytes:
    """The JSON of `fields`; the JSON text `raw[name]` replaces each value "@name"."""
    text = json.dumps({"model": MODEL, **fields})
    for mark, value in raw.items():
        text = text.replace(f'"@{mark}"', value)
    return text.encode("utf-8", "surrogatepass")


def completion(xargs: str, **fields: Any) -> bytes:
    body = {"max_tokens": 1, "prompt": [5, 6, 7], "temperature": 0, "vllm_xargs": XARGS}
    return _body({**body, **fields}, xargs=xargs)


def chat(xargs: str, **fields: Any) -> bytes:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "vllm_xargs": XARGS}
    return _body({**body, **fields}, xargs=xargs)


def predicted(prediction: str, **fields: Any) -> bytes:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    return _body({**body, "prediction": PREDICTION, **fields}, prediction=prediction)


def responses(xargs: str, **fields: Any) -> bytes:
    body = {"max_output_tokens": 1, "input": "a", "vllm_xargs": XARGS}
    return _body({**body, **fields}, xargs=xargs)


def generate(xargs: str, **fields: Any) -> bytes:
    """For vLLM's endpoint for token ids, which checks `extra_args` against no schema."""
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 1, "temperature": 0, "extra_args": XARGS},
    }
    return _body({**body, **fields}, xargs=xargs)


FUNCTION = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 24}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]


def tool_messages(result: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]


def with_tool_result(path: str, value: str) -> bytes:
    """A request with tools, and with this JSON text as the result of a call."""
    if path == "/v1/chat/completions":
        fields = dict(messages=tool_messages("@value"), tools=TOOLS, max_tokens=2)
    elif path == "/v1/responses":
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "1", "output": "@value"}
        tools = [{"type": "function", **FUNCTION}]
        fields = dict(input=[call, result], tools=tools, max_output_tokens=2)
    else:
        use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "@value"}
        turns = [("user", "a"), ("assistant", [use]), ("user", [result])]
        messages = [{"role": role, "content": content} for role, content in turns]
        tools = [{"name": "f", "input_schema": FUNCTION["parameters"]}]
        fields = dict(messages=messages, tools=tools, max_tokens=2)
    return _body(fields, value=value)


WITH_TOOLS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
ENDPOINTS = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": chat,  # which takes the same
    "/inference/v1/generate": generate,
}
STREAMS = {"/v1/completions", "/v1/chat/completions"}

# ---- the values ----------------------------------------------------------------------------------

VALUES: dict[str, str] = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "one half": "0.5",
    "a negative number": "-1",
    "2**63": str(2**63),
    "a number of 400 digits": "7" * 400,
    "a number of 5000 digits": "7" * 5000,
    "infinity": "1e999",
    "NaN": "NaN",
    "an empty text": '""',
    "NUL": r'"a\u0000b"',
    "a lone surrogate": r'"a\ud800b"',
    "lone surrogates in a list": r'["a", "\udfff"]',
    "emoji": '"\U0001f600\U0001f468\u200d\U0001f469"',
    "a text of 1 MB": json.dumps("x" * 1_000_000),
    "the number of an empty line": '"1: "',
    "an empty list": "[]",
    "an empty dict": "{}",
    "a list in a list": "[[5]]",
    "texts and numbers": '["a", 5]',
    "numbers and texts": '[5, "a"]',
    "truth values": "[true, false]",
    "fractions": "[5.5]",
    "NaN in a list": "[NaN]",
    "the first token id that is none": f"[{VOCAB}]",
    "a negative token id": "[-1]",
    "the token id 2**31": f"[{2**31}]",
    "the token id 2**64": f"[{2**64}]",
    "a token id of 400 digits": f"[{'7' * 400}]",
    "the right id behind 20,000 others": "[" + "5, " * 19_999 + "5]",
    "the wrong id behind 2,000 others": "[" + "5, " * 2000 + "999]",
    "65 texts": json.dumps(["a"] * 65),
    "10,000 empty texts": json.dumps([""] * 10_000),
    "a dict": '{"type": "content", "content": 5}',
    "a dict of 20,000 names": json.dumps({f"name-{i}": i for i in range(20_000)}),
    "100 nested lists": "[" * 100 + "]" * 100,
    "2,000 nested lists": "[" * 2000 + "]" * 2000,
    "100,000 nested lists": "[" * 100_000 + "]" * 100_000,
    "900 nested dicts": '{"a": ' * 900 + "5" + "}" * 900,
    "50,000 nested dicts": '{"a": ' * 50_000 + "5" + "}" * 50_000,
    "a list without an end": "[1, 2",
}
NAMES = ("reference", "namespace", "enabled")
STRANGE_NAMES: dict[str, str] = {
    "a name that is not known": "lookahead_depth",
    "a name with a dash": "lookahead-namespace",
    "a name with NUL": r"lookahead_\u0000",
    "a name with a lone surrogate": r"lookahead_\ud800",
    "a name of 100 KB": "lookahead_" + "x" * 100_000,
    "a name of emoji": "lookahead_" + "\U0001f600" * 500,
    "a name with a line break": r"lookahead_a\nTraceback (most recent call last):",
}


def expected_of(name: str, value: str) -> Expected:
    """The expected response if this field has this value."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return "refused"
    if parsed is None:
        return "either"  # most endpoints refuse null, the one for token ids accepts it
    valid = {
        "reference": _is_reference,
        "namespace": lambda v: isinstance(v, str) and 0 < len(v) <= MAX_NAMESPACE,
        "enabled": lambda v: isinstance(v, bool | int | float) and v in (0, 1),
    }[name](parsed)
    return "either" if valid else "refused"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.encode("utf-8", "replace").decode() == value


def _is_reference(value: Any) -> bool:
    def is_ids(items: Any) -> bool:
        # vLLM's schemas turn true and false into 1 and 0.
        return isinstance(items, list) and all(
            isinstance(item, int) and 0 <= item < VOCAB for item in items
        )

    if _is_text(value) or is_ids(value):
        return True
    return (
        isinstance(value, list)
        and len(value) <= MAX_REFERENCES
        and all(_is_text(item) or is_ids(item) for item in value)
    )


# ---- requests ------------------------------------------------------------------------------------


def every_value() -> Iterator[Request]:
    """Each value for each field at one of the endpoints, in turn; then strange names."""
    paths = sorted(ENDPOINTS)
    count = 0
    for name in NAMES:
        for value_name, value in VALUES.items():
            path = paths[count % len(paths)]
            count += 1
            stream = {"stream": True} if path in STREAMS and count % 2 else {}
            is_nested = path == "/inference/v1/generate" and count % 2 == 1
            text = '{"lookahead": {"%s": %s}}' if is_nested else '{"lookahead_%s": %s}'
            body = ENDPOINTS[path](text % (name, value), **stream)
            yield Request(f"{name}: {value_name}", path, body, expected_of(name, value))
    for name, strange in STRANGE_NAMES.items():
        for path, body_of in ENDPOINTS.items():
            yield Request(name, path, body_of(f'{{"{strange}": 1}}'))
    nested = '{"extra_body": ' * 2000 + "{}" + "}" * 2000
    yield Request("nested fields", "/v1/completions", completion(nested), "either")
    for value_name, value in VALUES.items():
        body = predicted(f'{{"type": "content", "content": {value}}}')
        expected = _of_content(value)
        yield Request(f"prediction: {value_name}", "/v1/chat/completions", body, expected)
        for path in WITH_TOOLS:
            body = with_tool_result(path, value)
            yield Request(f"tool result: {value_name}", path, body, "either")


def _of_content(value: str) -> Expected:
    """The expected response if a prediction has this content."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return "refused"
    is_empty_list = isinstance(parsed, list) and not parsed
    return "either" if is_empty_list or _is_text(parsed) else "refused"


def around_limits() -> Iterator[Request]:
    """References and namespaces of exactly the allowed size, and one above it."""
    for alphabet, letter in {"ASCII": "x", "Chinese": "文", "emoji": "\U0001f600"}.items():
        max_letters = 4 * MAX_TOKENS // len(letter.encode())
        for count, expected in ((max_letters, "answered"), (max_letters + 1, "refused")):
            text = letter * count
            name = f"{count} letters of {alphabet}"
            request = partial(Request, name, expected=expected)
            xargs = json.dumps({"lookahead_reference": text}, ensure_ascii=False)
            yield request("/v1/completions", completion(xargs))
            content = json.dumps({"type": "content", "content": text}, ensure_ascii=False)
            yield request("/v1/chat/completions", predicted(content, stream=True))
    for count, expected in ((MAX_TOKENS, "answered"), (MAX_TOKENS + 1, "refused")):
        ids = json.dumps([7] * count)
        body = completion(f'{{"lookahead_reference": {ids}}}')
        yield Request(f"{count} token ids", "/v1/completions", body, expected)
    for count, expected in ((MAX_REFERENCES, "answered"), (MAX_REFERENCES + 1, "refused")):
        xargs = json.dumps({"lookahead_reference": ["a b"] * count})
        yield Request(f"{count} texts", "/v1/completions", completion(xargs), expected)
    for count, expected in ((MAX_NAMESPACE, "answered"), (MAX_NAMESPACE + 1, "refused")):
        xargs = json.dumps({"lookahead_namespace": "\U0001f600" * count})
        name = f"a namespace of {count} characters"
        yield Request(name, "/v1/completions", completion(xargs), expected)

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    parts = [{"type": "input_text", "text": f'"{i}'} for i in range(5000)]
    result = {"type": "function_call_output", "call_id": "1", "output": parts}
    fields = dict(tools=[{"type": "function", "name": "f"}], truncation="auto")
    body = responses("{}", input=[call, result], **fields)
    yield Request("5000 tool results", "/v1/responses", body, "either")


def at_the_limit(rng: random.Random) -> Request:
    """A reference of the largest allowed size, and enough output tokens for its insertion."""
    max_tokens = rng.choice([16, 64, 128])
    kind = rng.choice(["token ids", "token ids", "ASCII", "Chinese", "prediction"])
    if kind == "token ids":
        reference: Any = rng.choices(range(5, VOCAB), k=MAX_TOKENS)
    elif kind == "Chinese":
        reference = "".join(map(chr, rng.choices(range(0x4E00, 0x9FA5), k=MAX_TOKENS)))
    else:
        reference = "".join(map(chr, rng.choices(range(32, 127), k=4 * MAX_TOKENS)))
    if kind == "prediction":
        content = json.dumps({"type": "content", "content": reference})
        body = predicted(content, max_tokens=max_tokens)
        return Request(kind, "/v1/chat/completions", body, "either")
    xargs = json.dumps({"lookahead_reference": reference})
    body = completion(xargs, max_tokens=max_tokens, ignore_eos=True)
    return Request(f"reference of {kind}", "/v1/completions", body, "either")


def in_a_new_namespace(rng: random.Random) -> Request:
    name = f"{rng.getrandbits(64):x}"
    if rng.random() < 0.5:
        body = completion(json.dumps({"lookahead_namespace": name}), max_tokens=2)
    else:
        body = completion("{}", cache_salt=name, max_tokens=2)
    return Request("a new namespace", "/v1/completions", body, "answered")
