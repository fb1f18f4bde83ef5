"""What models write that vLLM's tool parsers and reasoning parsers read: a format of each kind.

A stream gets its tokens in the same way whichever parser reads it.
"""

from typing import Any, NamedTuple

TOOLS: dict[str, dict[str, str]] = {
    "get_time": {"zone": "string"},
    "get_weather": {"city": "string", "days": "integer"},
}
"""The tools that the texts call, with the types of their arguments."""

FUNCTIONS = [
    {
        "name": name,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in arguments.items()},
        },
    }
    for name, arguments in TOOLS.items()
]
"""The tools as a request describes them."""

CALLS: tuple[tuple[str, dict[str, str | int]], ...] = (
    ("get_time", {"zone": "Rome"}),
    ("get_weather", {"city": "Paris", "days": 3}),
)

CHAT_TEMPLATE_KWARGS: dict[str, Any] = {
    "thinking": True,
    "enable_thinking": True,
    "reasoning_effort": "high",
}
"""What a request says to a chat template; some reasoning parsers are off without it."""

RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "\na:",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
"""The `response_template` of a tokenizer, which the parser `hf` reads; prompts end in "\\na:"."""


class Calls(NamedTuple):
    """How calls are written. Words in capitals are replaced; the end of a call follows END."""

    names: str
    """The tool parsers that read this."""
    call: str
    calls: str = "CALL\nCALL"
    """How two calls are put together."""
    argument: str = '"KEY": "VALUE", '
    """The comma of the last argument is left out."""
    sides: str = "before after"
    """Where there may be text."""


_JSON = '{"name": "NAME", "arguments": {ARGUMENTS}}END'
_LLAMA = '{"name": "NAME", "parameters": {ARGUMENTS}END}'
_QWEN = "<tool_call>\n<function=NAME>\nARGUMENTSEND</function>\n</tool_call>"
_GLM_ARGUMENT = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
_KIMI_K2 = (
    "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{ARGUMENTS}"
    "END<|tool_call_end|>"
)

TOOL_FORMATS = (
    Calls("hermes hf", f"<tool_call>\n{_JSON}\n</tool_call>"),
    Calls("llama3_json", _LLAMA, "<|python_tag|>CALL; CALL", sides="after"),
    Calls("xlam", _JSON, "[CALL, CALL]", sides="after"),
    Calls("mistral", "[TOOL_CALLS]NAME[ARGS]{ARGUMENTS}END", "CALLCALL", sides="before"),
    Calls(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{ARGUMENTS}END<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>CALLCALL<｜tool▁calls▁end｜>",
    ),
    Calls("kimi_k2", _KIMI_K2, "<|tool_calls_section_begin|>CALLCALL<|tool_calls_section_end|>"),
    Calls("pythonic", "NAME(ARGUMENTSEND)", "[CALL, CALL]", 'KEY="VALUE", ', sides="after"),
    Calls("qwen3_coder qwen3_xml", _QWEN, argument="<parameter=KEY>\nVALUE\n</parameter>\n"),
    Calls("glm45", "<tool_call>NAME\nARGUMENTSEND</tool_call>", argument=_GLM_ARGUMENT),
)


class Thinking(NamedTuple):
    """How a thought and an answer, one after the other, are written."""

    names: str
    """The reasoning parsers that read this."""
    thought: str = "<think>TEXT</think>"
    answer: str = "TEXT"


THINKING_FORMATS = (
    Thinking("deepseek_r1 glm45 hf kimi_k2"),
    Thinking("qwen3", "<think>\nTEXT\n</think>\n\n"),
    Thinking("hunyuan_a13b", "<think>\nTEXT\n</think>\n", "<answer>\nTEXT\n</answer>"),
    Thinking("mistral", "[THINK]TEXT[/THINK]"),
    Thinking("gemma4", "<|channel>thought\nTEXT<channel|>"),
    Thinking("granite", "Here is my thought process: TEXT ", "Here is my response: TEXT"),
)

_SPECIAL_TOKENS = """
<think> </think> <tool_call> </tool_call> <answer> </answer> <arg_key> </arg_key>
<arg_value> </arg_value> <|python_tag|> [TOOL_CALLS] [ARGS] [THINK] [/THINK]
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_argument_begin|>
<|tool_call_begin|> <|tool_call_end|> <|channel> <channel|>
"""


def tool_texts(name: str) -> dict[str, str]:
    """Texts with calls, as the models of a tool parser write them."""
    row = {name: row for row in TOOL_FORMATS for name in row.names.split()}[name]
    opening, between, closing = row.calls.split("CALL")
    (first, end), (second, _) = (_call(row, index) for index in range(2))
    one = f"{opening}{first}{end}{closing}"
    before = "I will look it up.\n" if "before" in row.sides else ""
    after = "\nPlease wait." if "after" in row.sides else ""
    return {
        "one call": one,
        "text around": before + one + after,
        "no end": opening + first,
        "two calls": f"{opening}{first}{end}{between}{second}{end}{closing}",
    }


def _call(row: Calls, index: int) -> list[str]:
    """A call and its end."""
    name, values = CALLS[index]
    number = row.argument.replace('"VALUE"', "VALUE")
    arguments = "".join(
        (row.argument if isinstance(value, str) else number)
        .replace("KEY", key)
        .replace("VALUE", str(value))
        for key, value in values.items()
    )
    call = row.call.replace("NAME", name).replace("INDEX", str(index))
    return call.replace("ARGUMENTS", arguments.rstrip(", ")).split("END")


def reasoning_texts(name: str) -> dict[str, str]:
    """Texts with a thought and an answer, as the models of a reasoning parser write them."""
    row = {name: row for row in THINKING_FORMATS for name in row.names.split()}[name]
    opening, closing = row.thought.split("TEXT")
    thought, answer = "Two and two.", row.answer.replace("TEXT", "Four.")
    long_thought = 'They ask for 2 + 2. I know it: 1 + 1 < 3.\n\nSo it is "4"; I write it out.'
    long_answer = row.answer.replace("TEXT", "It is four.\n\n- Two, and\n- two more: `2 + 2 = 4`.")
    return {
        "thinking and answer": f"{opening}{thought}{closing}{answer}",
        "opened by the prompt": f"{thought}{closing}{answer}",
        "answer alone": answer,
        "no end": f"{opening}{thought}",
        "long": f"{opening}{long_thought}{closing}{long_answer}",
    }


def special_tokens() -> list[str]:
    """Markers that are one token each for the models."""
    return _SPECIAL_TOKENS.split()
