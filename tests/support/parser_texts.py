"""What models write that vLLM's tool parsers and reasoning parsers read.

A parser reads the format of its models; parsers that read the same format share a row.
"""

from __future__ import annotations

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

EXCUSED = {
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "openai": "needs the vocabulary of gpt-oss, which openai_harmony downloads",
    "openai_gptoss": "needs the vocabulary of gpt-oss, which openai_harmony downloads",
    **dict.fromkeys(("beam", "muse", "musespark1x", "step5"), "new in vLLM 0.33: no texts yet"),
}
"""Parsers that have no texts, and why."""


class Calls(NamedTuple):
    """How calls are written. Words in capitals are replaced; the end of a call follows END."""

    names: str
    """The tool parsers that read this."""
    call: str
    calls: str = "CALL\nCALL"
    """How two calls are put together; with one CALL, there is only one in an answer."""
    argument: str = '"KEY": "VALUE", '
    """The comma of the last argument is left out."""
    number: str = ""
    """An argument that is a number, if it differs by more than the quotes."""
    text: str = "TEXT"
    """How text beside calls is written."""
    sides: str = "before after"
    """Where there may be text."""


_JSON = '{"name": "NAME", "arguments": {ARGUMENTS}}END'
_LLAMA = '{"name": "NAME", "parameters": {ARGUMENTS}END}'
_PYTHON = 'KEY="VALUE", '
_QWEN = "<tool_call>\n<function=NAME>\nARGUMENTSEND</function>\n</tool_call>"
_QWEN_ARGUMENT = "<parameter=KEY>\nVALUE\n</parameter>\n"
_MIMO_ARGUMENT = "<parameter=KEY>VALUE</parameter>\n"
_INVOKE = '<invoke name="NAME">\nARGUMENTSEND</invoke>\n'
_INVOKE_ARGUMENT = '<parameter name="KEY">VALUE</parameter>\n'
_GLM_ARGUMENT = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
_DSML = '<｜DSML｜invoke name="NAME">\nARGUMENTSEND</｜DSML｜invoke>\n'
_DSML_ARGUMENT = '<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\n'
_DSML_NUMBER = _DSML_ARGUMENT.replace("true", "false")
_DEEPSEEK = "<｜tool▁calls▁begin｜>CALL\nCALL<｜tool▁calls▁end｜>"
_DEEPSEEK_V3 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{ARGUMENTS}\n```"
    "END<｜tool▁call▁end｜>"
)
_KIMI_K2 = (
    "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{ARGUMENTS}"
    "END<|tool_call_end|>"
)
_KIMI_K3 = '<|open|>call tool="NAME" index="INDEX"<|sep|>ARGUMENTSEND<|close|>call<|sep|>'
_KIMI_K3_ARGUMENT = '<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>'
_KIMI_K3_TEXT = "<|open|>response<|sep|>TEXT<|close|>response<|sep|>"
_INKLING = (
    '<|message_model|><|content_invoke_tool_json|>{"name": "NAME", "args": {ARGUMENTS}}'
    "END<|end_message|>"
)
_INKLING_TEXT = "<|message_model|><|content_text|>TEXT<|end_message|>"
_MUSE = (
    "<|start|>assistant to=NAME<|message|><atem:function_calls>\n"
    '<atem:invoke name="NAME">\nARGUMENTSEND</atem:invoke>\n</atem:function_calls><|eom|>'
)
_MUSE_TEXT = "<|start|>assistant to=user<|message|>TEXT<|eom|>"
_PLAMO = (
    "<|plamo:begin_tool_request:plamo|>"
    "<|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{ARGUMENTS}"
    "END<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
)
_STEP3 = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">ARGUMENTS'
    "END</steptml:invoke><｜tool_call_end｜>\n"
)

TOOL_FORMATS = (
    # JSON: an object for each call, ...
    Calls("hermes qwen3_json granite4 ernie45 hf", f"<tool_call>\n{_JSON}\n</tool_call>"),
    Calls("longcat", f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>"),
    Calls("granite-20b-fc", f"<function_call> {_JSON}", sides="after"),
    Calls("llama3_json", _LLAMA, "<|python_tag|>CALL; CALL", sides="after"),
    Calls("llama4_json", _LLAMA, "CALL; CALL", sides="after"),
    Calls("internlm", f"<|action_start|><|plugin|>\n{_LLAMA}<|action_end|>\n", "CALL"),
    Calls("gigachat3", f"<|function_call|>{_JSON}", "CALL", sides="before"),
    # ... an array of them, ...
    Calls("xlam", _JSON, "[CALL, CALL]", sides="after"),
    Calls("phi4_mini_json", _JSON, "functools[CALL, CALL]"),
    Calls("granite", _JSON, "<|tool_call|>[CALL, CALL]"),
    Calls("hunyuan_a13b", _JSON, "<tool_calls>[CALL, CALL]</tool_calls>", sides="after"),
    Calls("jamba", _JSON, "<tool_calls>[CALL, CALL]</tool_calls>"),
    Calls("apertus", '{"NAME": {ARGUMENTS}}END', "<|tools_prefix|>[CALL, CALL]<|tools_suffix|>"),
    # ... or the arguments alone.
    Calls("mistral", "[TOOL_CALLS]NAME[ARGS]{ARGUMENTS}END", "CALLCALL", sides="before"),
    Calls("deepseek_v3", _DEEPSEEK_V3, _DEEPSEEK),
    Calls(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{ARGUMENTS}END<｜tool▁call▁end｜>",
        _DEEPSEEK.replace("\n", ""),
    ),
    Calls("kimi_k2", _KIMI_K2, "<|tool_calls_section_begin|>CALLCALL<|tool_calls_section_end|>"),
    Calls("inkling", _INKLING, "CALLCALL", text=_INKLING_TEXT),
    Calls(
        "plamo3",
        _PLAMO,
        "<|plamo:begin_tool_requests:plamo|>CALLCALL<|plamo:end_tool_requests:plamo|>",
    ),
    # Python
    Calls("pythonic", "NAME(ARGUMENTSEND)", "[CALL, CALL]", _PYTHON, sides="after"),
    Calls(
        "llama4_pythonic",
        "NAME(ARGUMENTSEND)",
        "<|python_start|>[CALL, CALL]<|python_end|>",
        _PYTHON,
        sides="after",
    ),
    Calls(
        "olmo3",
        "NAME(ARGUMENTSEND)",
        "<function_calls>CALL\nCALL</function_calls>",
        _PYTHON,
        sides="after",
    ),
    Calls(
        "lfm2", "NAME(ARGUMENTSEND)", "<|tool_call_start|>[CALL, CALL]<|tool_call_end|>", _PYTHON
    ),
    # XML
    Calls("qwen3_coder qwen3_xml step3p5", _QWEN, argument=_QWEN_ARGUMENT),
    Calls("mimo", _QWEN, argument=_MIMO_ARGUMENT),
    Calls("seed_oss", _QWEN.replace("tool_call", "seed:tool_call"), argument=_MIMO_ARGUMENT),
    Calls(
        "glm45 glm47 ling3 poolside_v1",
        "<tool_call>NAME\nARGUMENTSEND</tool_call>",
        argument=_GLM_ARGUMENT,
    ),
    Calls(
        "hy_v3",
        "<tool_call>NAME<tool_sep>\nARGUMENTSEND</tool_call>\n",
        "<tool_calls>\nCALLCALL</tool_calls>",
        _GLM_ARGUMENT,
    ),
    Calls(
        "hy_v4",
        "<tool_call>NAMEARGUMENTSEND</tool_call>",
        "<tool_calls>CALLCALL</tool_calls>",
        _GLM_ARGUMENT.replace("\n", ""),
    ),
    Calls(
        "k2_horizon",
        "<ifm|tool_call>NAME\nARGUMENTSEND</ifm|tool_call>\n",
        "<ifm|tool_calls>\nCALLCALL</ifm|tool_calls>",
        _GLM_ARGUMENT.replace("arg_", "ifm|arg_"),
    ),
    Calls(
        "minicpm5",
        '<function name="NAME">ARGUMENTSEND</function>',
        argument='<param name="KEY">VALUE</param>',
    ),
    Calls(
        "minimax_m2", _INVOKE, "<minimax:tool_call>\nCALLCALL</minimax:tool_call>", _INVOKE_ARGUMENT
    ),
    Calls(
        "minimax_m3",
        _INVOKE.replace("<", "]<]minimax[>[<"),
        "]<]minimax[>[<tool_call>\nCALLCALL]<]minimax[>[</tool_call>",
        "]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>\n",
    ),
    Calls("dots", _INVOKE, "<dots_function_call>\nCALLCALL</dots_function_call>", _INVOKE_ARGUMENT),
    Calls(
        "step3",
        _STEP3,
        "<｜tool_calls_begin｜>\nCALLCALL<｜tool_calls_end｜>",
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
    ),
    Calls(
        "muse_glimmer",
        _MUSE,
        "CALLCALL",
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        text=_MUSE_TEXT,
    ),
    Calls(
        "deepseek_v32",
        _DSML,
        "<｜DSML｜function_calls>\nCALLCALL</｜DSML｜function_calls>",
        _DSML_ARGUMENT,
        _DSML_NUMBER,
    ),
    Calls(
        "deepseek_v4",
        _DSML,
        "<｜DSML｜tool_calls>\nCALLCALL</｜DSML｜tool_calls>",
        _DSML_ARGUMENT,
        _DSML_NUMBER,
    ),
    Calls(
        "deepseek_v41",
        _DSML.replace("DSML｜", "DSML｜ "),
        "<｜DSML｜ calls>\nCALLCALL</｜DSML｜ calls>",
        _DSML_ARGUMENT.replace("DSML｜", "DSML｜ "),
        _DSML_NUMBER.replace("DSML｜", "DSML｜ "),
    ),
    # Formats of their own
    Calls(
        "functiongemma",
        "<start_function_call>call:NAME{ARGUMENTSEND}<end_function_call>",
        "CALLCALL",
        "KEY:<escape>VALUE<escape>,",
    ),
    Calls(
        "gemma4",
        "<|tool_call>call:NAME{ARGUMENTSEND}<tool_call|>",
        "CALLCALL",
        'KEY:<|"|>VALUE<|"|>,',
        "KEY:VALUE,",
    ),
    Calls(
        "kimi_k3",
        _KIMI_K3,
        "<|open|>tools<|sep|>CALLCALL<|close|>tools<|sep|>",
        _KIMI_K3_ARGUMENT,
        _KIMI_K3_ARGUMENT.replace("string", "number"),
        text=_KIMI_K3_TEXT,
    ),
)


class Thinking(NamedTuple):
    """How a thought and an answer, one after the other, are written."""

    names: str
    """The reasoning parsers that read this."""
    thought: str = "<think>TEXT</think>"
    answer: str = "TEXT"


THINKING_FORMATS = (
    Thinking(
        "deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 glm45 glm47 hf holo2 hy_v3 hy_v4"
        " kimi_k2 ling3 minicpmv minimax_m2 minimax_m2_append_think olmo3 poolside_v1"
    ),
    Thinking(
        "granite_thinking_parser mimo nemotron_v3 qwen3 step3p5", "<think>\nTEXT\n</think>\n\n"
    ),
    Thinking("hunyuan_a13b", "<think>\nTEXT\n</think>\n", "<answer>\nTEXT\n</answer>"),
    Thinking("step3", "TEXT</think>"),
    Thinking("ernie45", "<think>\nTEXT\n</think>\n\n", "<response>\nTEXT\n</response>\n"),
    Thinking("seed_oss", "<seed:think>TEXT</seed:think>"),
    Thinking("minimax_m3", "<mm:think>TEXT</mm:think>"),
    Thinking("k2_horizon", "<ifm|think>TEXT</ifm|think>"),
    Thinking("mistral", "[THINK]TEXT[/THINK]"),
    Thinking("plamo3", "<|plamo:begin_think:plamo|>TEXT<|plamo:end_think:plamo|>"),
    Thinking("gemma4", "<|channel>thought\nTEXT<channel|>"),
    Thinking("granite", "Here is my thought process: TEXT ", "Here is my response: TEXT"),
    Thinking("inkling", _INKLING_TEXT.replace("content_text", "content_thinking"), _INKLING_TEXT),
    Thinking("kimi_k3", _KIMI_K3_TEXT.replace("response", "think"), _KIMI_K3_TEXT),
    Thinking("muse_glimmer", _MUSE_TEXT.replace("user", "self"), _MUSE_TEXT.replace("eom", "eot")),
)

_SPECIAL_TOKENS = """
Ġ</ </ think
<think> </think> <tool_call> </tool_call> <tool_calls> </tool_calls> <tool_sep> <assistant>
<arg_key> </arg_key> <arg_value> </arg_value> <response> </response> <answer> </answer>
<longcat_tool_call> </longcat_tool_call> <function_call> <|tool_call|> <|python_tag|>
<|python_start|> <|python_end|> <|action_start|> <|action_end|> <|plugin|> <|function_call|>
<|tools_prefix|> <|tools_suffix|> [TOOL_CALLS] [ARGS] [THINK] [/THINK]
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
<｜tool_calls_begin｜> <｜tool_calls_end｜> <｜tool_call_begin｜> <｜tool_call_end｜> <｜tool_sep｜>
<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_argument_begin|>
<|tool_call_begin|> <|tool_call_end|> <|tool_call_start|> ｜DSML｜ ]<]minimax[>[
<|message_model|> <|content_text|> <|content_thinking|> <|content_invoke_tool_json|>
<|end_message|> <|plamo:begin_ <|plamo:end_ :plamo|> <|plamo:constrain|> <|plamo:msg|>
<seed:think> </seed:think> <seed:tool_call> </seed:tool_call> <mm:think> </mm:think>
<minimax:tool_call> </minimax:tool_call> <dots_function_call> </dots_function_call>
<ifm|think> </ifm|think> <ifm|tool_calls> </ifm|tool_calls> <ifm|tool_call> </ifm|tool_call>
<ifm|arg_key> </ifm|arg_key> <ifm|arg_value> </ifm|arg_value>
<start_function_call> <end_function_call> <escape> <|tool_call> <tool_call|> <|"|>
<|channel> <channel|> <|open|> <|close|> <|sep|> <|start|> <|message|> <|eom|> <|eot|>
"""


def tool_texts(name: str) -> dict[str, str]:
    """Texts with calls, as the models of a tool parser write them."""
    row = {name: row for row in TOOL_FORMATS for name in row.names.split()}[name]
    opening, *between, closing = row.calls.split("CALL")
    (first, end), (second, _) = (_call(row, index) for index in range(2))
    one = f"{opening}{first}{end}{closing}"
    before = row.text.replace("TEXT", "I will look it up.\n") if "before" in row.sides else ""
    after = row.text.replace("TEXT", "\nPlease wait.") if "after" in row.sides else ""
    texts = {"one call": one, "text around": before + one + after, "no end": opening + first}
    if between:
        texts["two calls"] = f"{opening}{first}{end}{between[0]}{second}{end}{closing}"
    return texts


def _call(row: Calls, index: int) -> list[str]:
    """A call and its end."""
    name, values = CALLS[index]
    number = row.number or row.argument.replace('"VALUE"', "VALUE")
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
