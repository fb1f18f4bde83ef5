"""Tool results reach the proposer as the model's next call would spell them."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.engines.target_guided import follow
from lookahead_vllm.engine import plugin
from lookahead_vllm.engine.front_end.tool_results import (
    new_results,
    spelled,
    writes_raw_arguments,
)
from lookahead_vllm.options import request as request_options
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.request import RequestOptions, parse_options, with_options
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.driving import drafter_of, engine, generate, of_length
from tests.support.models import save_config
from tests.support.parser_texts import FUNCTIONS
from tests.support.scripted_core import Script, Server, scripted_server
from tests.support.tokenizer import save_tokenizer

CAT = '     1\tdef f():\n     2\t    return "a\\b"\n'
CODE = 'def f():\n    return "a\\b"\n'
ESCAPED = r"def f():\n    return \"a\\b\"\n"


@pytest.mark.parametrize(
    ("text", "escaped", "raw"),
    [
        (CAT, [ESCAPED], ["\n" + CODE]),
        (CAT.replace("\t", "→"), [ESCAPED], ["\n" + CODE]),
        ("7: x\n8:y\n12|z", [r"x\ny\nz"], ["\nx\ny\nz"]),
        (CODE, [ESCAPED], []),
        ("1: a\nb\nc\nd\ne", [r"1: a\nb\nc\nd\ne"], []),  # too few numbers
        ("done: no é", [], []),
        ("", [], []),
    ],
)
def test_a_text_is_spelled_as_in_a_call(text, escaped, raw):
    assert spelled([text], is_raw=False) == escaped
    assert spelled([text], is_raw=True) == raw


@pytest.mark.parametrize("is_raw", [True, False])
def test_spellings_have_the_length_of_results_at_most(is_raw):
    """The newest ones whole: escaped, a character may become six, and a raw one begins a line."""
    old, new = "1: \0\n" * 20_000, "1: \0\n2: \0"
    texts = spelled([old, old, new], is_raw)
    assert sum(map(len, texts)) == 65_536
    assert texts[-1] == ("\n\0\n\0" if is_raw else r"\u0000\n\u0000")
    assert spelled(["\0" * 65_536], is_raw) == ([] if is_raw else [r"\u0000" * 10_922 + r"\u00"])


def test_new_results_are_those_after_the_last_answer():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "old"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "tool", "content": None},
        {"role": "user", "content": "a reminder"},
    ]
    assert new_results(messages) == ("first", "a", "b")
    assert new_results(messages[:4]) == new_results(messages[:1]) == new_results([]) == ()


def test_the_newest_results_are_taken_up_to_the_limits_of_references():
    def results(texts: list[str]) -> tuple[str, ...]:
        parts = [{"type": "text", "text": text} for text in texts]
        return new_results([{"role": "tool", "content": parts}])

    texts = [f"number {i}" for i in range(5000)]
    assert results(texts) == tuple(texts[-64:])
    assert [*map(len, results(["a" * 40_000, "b" * 30_000, "c" * 30_000]))] == [
        5536,
        30_000,
        30_000,
    ]
    assert results(["a", "b" * 65_536]) == ("b" * 65_536,)


@pytest.mark.parametrize(
    ("template", "is_raw"),
    [
        ("{{'<tool_call>\n<function=' + name + '>\n<parameter=' + key + '>\n'}}", True),
        ("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>", True),
        ('<invoke name="x"><parameter name="{{ key }}">', True),
        ('<｜DSML｜parameter name="{{ key }}" string="true">', True),
        ('{"name": <function-name>, "parameters": <args-json-object>} <tool_call>', False),
        ("<parameters>", False),
        ("", False),
        (None, False),
    ],
)
def test_the_chat_template_says_how_calls_are_written(template, is_raw):
    class Tokenizer:
        chat_template = template

    assert writes_raw_arguments(Tokenizer()) == is_raw
    assert not writes_raw_arguments(object())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with scripted_server(save_tokenizer(save_config("llama", tmp_path_factory.mktemp("m")))) as it:
        it.configure(tool="hermes")
        yield it


CALL = {"name": "get_time", "arguments": "{}"}
CHAT = dict(
    messages=[
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
        },
        {"role": "tool", "tool_call_id": "1", "content": CAT},
    ],
    tools=[{"type": "function", "function": function} for function in FUNCTIONS],
    max_tokens=2,
)
PARTS = json.loads(json.dumps(CHAT))
PARTS["messages"][2]["content"] = [{"type": "text", "text": CAT}]
RESPONSES = dict(
    input=[
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "1", **CALL},
        {"type": "function_call_output", "call_id": "1", "output": CAT},
    ],
    tools=[{"type": "function", **function} for function in FUNCTIONS],
    max_output_tokens=2,
)
MESSAGES = dict(
    messages=[
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "get_time", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": CAT}]},
    ],
    tools=[{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
    max_tokens=2,
)
OFF = {"vllm_xargs": {"lookahead_enabled": False}}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", CHAT, [ESCAPED]),
        ("/v1/chat/completions", PARTS, [ESCAPED]),
        ("/v1/responses", RESPONSES, [ESCAPED]),
        ("/v1/messages", MESSAGES, [ESCAPED]),
        ("/v1/chat/completions", CHAT | OFF, []),
        ("/v1/chat/completions", CHAT | {"tools": None}, []),
        ("/v1/chat/completions", CHAT | {"tool_choice": "none"}, []),
        ("/v1/responses", RESPONSES | {"input": "hi"}, []),
    ],
)
def test_every_endpoint_sends_the_new_results(server, path, body, expected):
    server.core.received.clear()
    server.stream(path, Script([[5], [6]]), body)
    (request,) = server.core.received
    extra_args = request.sampling_params.extra_args
    options, others = request_options.options_in_worker(extra_args)
    decode = server.core.engine.renderer.tokenizer.decode
    assert [decode(ids) for ids in options.spellings] == expected
    assert not others and not options.references


def test_a_call_is_drafted_from_them(llama, monkeypatch):
    """An answer that copies them is accepted; without them there is nothing to copy."""
    monkeypatch.delenv(plugin.PLAIN_V2)  # as in benchmarks
    rng = np.random.default_rng(0)
    prompts, answers = rng.integers(5, 100, (2, 2, 60)).tolist()
    params = []
    for answer, spellings in zip(
        answers, ((), (np.array(answers[1], "<i4").tobytes(),)), strict=True
    ):
        extra_args = with_options(None, RequestOptions(namespace="n", spellings=spellings))
        params.append(of_length(len(answer), extra_args=extra_args))
    with engine(llama, {"budget": 8}, max_num_seqs=1) as llm:
        follow(llm, prompts, answers)
        accepted = [0]
        for prompt, answer, own in zip(prompts, answers, params, strict=True):
            assert generate(llm, [prompt], own) == [[answer]]
            accepted.append(drafter_of(llm).counters.accepted_nodes)
        without, within = np.diff(accepted)
        assert without < 10 and within > 40


def test_a_client_cannot_write_them():
    """JSON has no tuples; the message is that of an option that does not exist."""
    for value in (["a"], "a", None):
        with pytest.raises(OptionError, match="'lookahead_tool_results' was given, but the opt"):
            parse_options({"lookahead_tool_results": value}, 128, LookaheadOptions())
    options = parse_options({"lookahead_tool_results": ("a",)}, 128, LookaheadOptions())
    assert options == RequestOptions(spellings=("a",))
