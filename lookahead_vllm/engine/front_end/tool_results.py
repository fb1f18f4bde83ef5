"""The new tool results of a request, as its answer would spell them in a tool call.

An agent reads a file with line numbers and writes a part of it as a JSON string: without the
numbers, and with quotes and line ends escaped. No n-gram of what it has read matches that.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lookahead_vllm.options.request import (
    BYTES_PER_TOKEN,
    MAX_REFERENCE_TOKENS,
    MAX_REFERENCES,
    TOOL_RESULTS,
)

MAX_CHARACTERS = MAX_REFERENCE_TOKENS * BYTES_PER_TOKEN
"""Of a request's tool results in all, and of their spellings."""

_LINE_NUMBER = re.compile(r"^ {0,6}\d{1,6}(?:→|\t|: ?|\|)", re.MULTILINE)
_RAW_ARGUMENT = re.compile(r"<[^\s<>\"'{}]*parameter[= ]|<arg_value>")
"""How chat templates write arguments that are not escaped, as Qwen3-Coder's and GLM's do."""


def with_tool_results(original: Callable[..., Any]) -> Callable[..., Any]:
    """`to_sampling_params` of a chat's or a response's request, which notes its tool results."""

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        messages = getattr(self, "messages", None) or getattr(self, "input", None)
        if self.tools and self.tool_choice != "none" and isinstance(messages, list):
            texts = new_results(messages)
            if texts:
                params.extra_args = {**(params.extra_args or {}), TOOL_RESULTS: texts}
        return params

    return to_sampling_params


def new_results(messages: Sequence[Any]) -> tuple[str, ...]:
    """The texts of the tool results after the model's last message, in their order.

    Earlier ones have come with earlier requests of the conversation. Of many, the newest are taken,
    up to the limits of references.
    """
    texts, left = [], MAX_CHARACTERS
    for text in itertools.islice(_from_the_newest(messages), MAX_REFERENCES):
        texts.append(text[:left])
        left -= len(texts[-1])
    return tuple(filter(None, reversed(texts)))


def _from_the_newest(messages: Sequence[Any]) -> Iterator[str]:
    for message in reversed(messages):
        get = message.get if isinstance(message, dict) else functools.partial(getattr, message)
        kind = get("role", None) or get("type", None)
        if kind in ("tool", "function_call_output"):
            content = get("content", None) or get("output", None)
            parts = content if isinstance(content, list) else [{"text": content}]
            found = (part.get("text") for part in parts if isinstance(part, dict))
            yield from reversed([text for text in found if isinstance(text, str)])
        elif kind not in ("user", "system", "developer"):
            break


def writes_raw_arguments(tokenizer: Any) -> bool:
    """Whether calls have their arguments as they are, by the tokenizer's chat template.

    All other formats are taken for JSON.
    """
    return bool(_RAW_ARGUMENT.search(str(getattr(tokenizer, "chat_template", ""))))


def spelled(texts: Sequence[str], is_raw: bool) -> list[str]:
    """These texts without the numbers of their lines, and escaped as in JSON unless `is_raw`;
    those that this changes, the newest up to MAX_CHARACTERS."""
    result, left = [], MAX_CHARACTERS
    for text in reversed(texts):
        bare, num_numbers = _LINE_NUMBER.subn("", text)
        if 3 * num_numbers < text.count("\n"):
            bare = text
        spelling = bare if is_raw else json.dumps(bare, ensure_ascii=False)[1:-1]
        if spelling != text:
            result.append(("\n" + spelling if is_raw else spelling)[:left])
            left -= len(result[-1])
    return list(filter(None, reversed(result)))
