"""Texts from which a proposer learns before it serves: documents, chats and earlier answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.json_lines import are_token_ids, parse_line

RESPONSES = ("response", "completion")
"""The keys under which a line may hold its answer."""

_EXPECTED = (
    "an object with `text`, with `output_token_ids`, with `messages`, or with `prompt` and "
    "`response` is expected"
)


class TextError(ValueError):
    """A text cannot be used; the message names the file, the line and what is expected."""


class Text(NamedTuple):
    """A prompt and its answer, as token ids."""

    prompt: list[int]
    """Empty for a document."""
    answer: list[int]


def read_texts(path: Path, tokenizer: Any) -> Iterator[Text]:
    """Read the texts of a file, in order.

    Parameters
    ----------
    path : Path
        In a `.jsonl` file, each line is a text. Any other file is one document in UTF-8.
    tokenizer
        A tokenizer from `transformers`.

    Raises
    ------
    TextError
        The file cannot be read, or a line is not a text.
    """
    max_id = max(tokenizer.get_vocab().values())
    number = 0
    try:
        with path.open("rb") as file:
            if path.suffix != ".jsonl":
                yield Text([], _encode(tokenizer, file.read().decode("utf-8-sig")))
                return
            for raw in file:
                number += 1
                turns = _turns(parse_line(raw), tokenizer) if raw.strip() else []
                if any(token > max_id for turn in turns for part in turn for token in part):
                    raise ValueError(f"a token id is above {max_id}, the tokenizer's last")
                yield from turns
    except UnicodeDecodeError:
        raise TextError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TextError(f"{path}, line {number}: {error}") from None


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _turns(line: Any, tokenizer: Any) -> list[Text]:
    """The prompt and the answer of each turn in a line; ValueError if the line is malformed."""
    if not isinstance(line, dict):
        raise ValueError(_EXPECTED)
    if "output_token_ids" in line:
        prompt = _ids(line, "prompt_token_ids") if line.get("prompt_token_ids") else []
        return [Text(prompt, _ids(line, "output_token_ids"))]
    if "messages" in line:
        _refuse_surrogates(line["messages"])
        return _turns_of_chat(line["messages"], tokenizer)
    answer = next((line[key] for key in ("text", *RESPONSES) if key in line), None)
    prompt_text = line.get("prompt", "") if "text" not in line else ""
    if not isinstance(answer, str) or not isinstance(prompt_text, str):
        raise ValueError(_EXPECTED)
    _refuse_surrogates([prompt_text, answer])
    # A server puts special tokens before a prompt, and none before an answer.
    prompt = list(tokenizer.encode(prompt_text, verbose=False)) if prompt_text else []
    return [Text(prompt, _encode(tokenizer, answer))]


def _refuse_surrogates(texts: Any) -> None:
    """ValueError if a text has half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(texts, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"its text has half of a surrogate pair, \\u{code:04x}") from None


def _ids(line: dict[str, Any], key: str) -> list[int]:
    ids = line[key]
    if not are_token_ids(ids):
        raise ValueError(f"`{key}` must be a list of token ids")
    return ids


def _turns_of_chat(messages: Any, tokenizer: Any) -> list[Text]:
    """Each of the assistant's messages as an answer, with the chat before it as its prompt."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("`messages` must be a list of objects with `role` and `content`")
    turns = []
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            prompt = _render(tokenizer, messages[:i], add_generation_prompt=True)
            whole = _render(tokenizer, messages[: i + 1], add_generation_prompt=False)
        except Exception as error:
            sentence = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"the chat template refuses it: {sentence}") from None
        if whole[: len(prompt)] == prompt:
            turns.append(Text(prompt, whole[len(prompt) :]))
        else:  # some templates render the last message differently from earlier ones
            turns.append(Text(prompt, _encode(tokenizer, str(message.get("content", "")))))
    if not turns:
        raise ValueError("`messages` has none of the role `assistant`")
    return turns


def _render(tokenizer: Any, messages: list[Any], add_generation_prompt: bool) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False
        )
    )


def learn(proposer: NGramTrieProposer, text: Text, namespace: str = "") -> None:
    """Feed the text to the proposer as a request."""
    proposer.start("warming", text.prompt, namespace)
    proposer.extend({"warming": np.array(text.answer, np.int32)})  # type: ignore[dict-item]
    proposer.finish("warming")
