"""Texts from which a proposer learns before it serves: documents, chats and earlier answers."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.json_lines import are_token_ids, read_json_lines

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


class Renderer(Protocol):
    """Texts as the token ids that a server makes of them."""

    def text(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text without a template."""

    def chat(
        self, chat: Mapping[str, Any], messages: Sequence[Any], add_generation_prompt: bool
    ) -> list[int]:
        """The token ids of the first messages of a chat, with its tools.

        Raises
        ------
        ValueError
            A server would refuse them; the message is one sentence.
        """


# ---- checking, without a tokenizer ---------------------------------------------------------------


def check_texts(path: Path) -> int:
    """Check every line of a file of texts; returns its largest token id, -1 if it has none.

    In a `.jsonl` file, each line is a text. Any other file is one document in UTF-8.

    Raises
    ------
    TextError
        The file cannot be read, or a line is not a text.
    """
    largest = -1
    for place, line in _lines(path):
        try:
            check_line(line)
        except ValueError as error:
            raise TextError(f"{place}: {error}") from None
        if "output_token_ids" in line:
            largest = max([largest, *(token for ids in _recorded(line) for token in ids)])
    return largest


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The place and the value of each line; a document counts as a line with `text`."""
    if path.suffix == ".jsonl":
        for number, line in read_json_lines(path, TextError):
            yield f"{path}, line {number}", line
        return
    try:
        yield str(path), {"text": path.read_bytes().decode("utf-8-sig")}
    except UnicodeDecodeError:
        raise TextError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None


def check_line(line: Any) -> None:
    """ValueError if a line is malformed."""
    if not isinstance(line, dict):
        raise ValueError(_EXPECTED)
    if "output_token_ids" in line:
        for key, ids in zip(("prompt_token_ids", "output_token_ids"), _recorded(line), strict=True):
            if not are_token_ids(ids):
                raise ValueError(f"`{key}` must be a list of token ids")
        return
    if "messages" in line:
        if not isinstance(line["messages"], list) or not all(map(_is_message, line["messages"])):
            raise ValueError(
                "`messages` must be a list of objects with a `role`, and with a `content` that is "
                "a text, a list or null"
            )
    elif not all(isinstance(part, str) for part in _prompt_and_answer(line)):
        raise ValueError(_EXPECTED)
    try:
        json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # no tokenizer takes it
        code = ord(error.object[error.start])
        raise ValueError(f"its text has half of a surrogate pair, \\u{code:04x}") from None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list | None)
    )


def _recorded(line: Mapping[str, Any]) -> Text:
    """The parts of a line with token ids; its prompt may be missing."""
    return Text(line.get("prompt_token_ids") or [], line["output_token_ids"])


def _prompt_and_answer(line: Mapping[str, Any]) -> tuple[Any, Any]:
    """The two parts of a line with `text`, or with `prompt` and `response`."""
    if "text" in line:
        return "", line["text"]
    return line.get("prompt", ""), next((line[key] for key in RESPONSES if key in line), None)


# ---- reading -------------------------------------------------------------------------------------


def read_texts(path: Path, renderer: Renderer, skip: Callable[[str], object]) -> Iterator[Text]:
    """Read the texts of a file that `check_texts` has checked, in order, those of `longest_chats`.

    `skip` is called with one sentence for each line that a server would refuse.
    """
    for place, line in longest_chats(lambda: _lines(path)):
        try:
            turns = list(turns_of(line, renderer))
        except ValueError as error:
            skip(f"{place}: {error}")
            continue
        yield from turns


def longest_chats(lines: Callable[[], Iterable[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """Places and lines without the chats with which another one begins, and without equal ones: a
    log of requests has each conversation once a turn.

    `lines` reads them, and is called twice, so that a file need not be held in memory.
    """
    hashes: list[list[bytes]] = []
    for _, line in lines():
        running = sha256()
        hashes.append([])
        for message in _messages(line):
            running.update(json.dumps(message, sort_keys=True).encode())
            hashes[-1].append(running.digest())
    known = {one for own in hashes for one in own[:-1]}
    for (place, line), own in zip(lines(), hashes, strict=True):
        if not own or own[-1] not in known:
            yield place, line
        known.update(own)


def _messages(line: Any) -> Sequence[Any]:
    messages = line.get("messages") if isinstance(line, dict) else None
    return messages if isinstance(messages, list) else ()


def turns_of(line: Mapping[str, Any], renderer: Renderer) -> Iterator[Text]:
    """The prompt and the answer of each turn in a line; ValueError if there is none."""
    if "output_token_ids" in line:
        yield _recorded(line)
    elif "messages" in line:
        yield from _turns_of_chat(line, renderer)
    else:
        prompt, answer = _prompt_and_answer(line)
        # A server puts special tokens before a prompt, and none before an answer.
        yield Text(
            renderer.text(prompt, add_special_tokens=True) if prompt else [],
            renderer.text(answer, add_special_tokens=False),
        )


def _turns_of_chat(chat: Mapping[str, Any], renderer: Renderer) -> Iterator[Text]:
    """Each of the assistant's messages as an answer, with the chat before it as its prompt."""
    messages = chat["messages"]
    # A message before all others is no model's answer.
    answers = [i for i, m in enumerate(messages) if i > 0 and m["role"] == "assistant"]
    if not answers:
        raise ValueError(
            "`messages` has no answer, a message of the role `assistant` after others; append the "
            "one of the reply, `choices[0].message`"
        )
    for i in answers:
        prompt = renderer.chat(chat, messages[:i], add_generation_prompt=True)
        whole = renderer.chat(chat, messages[: i + 1], add_generation_prompt=False)
        start = _num_common(whole, prompt)
        if start < len(prompt):
            # Some templates render the last message differently from earlier ones, or end a prompt
            # with tokens that no finished chat has. The answer begins where an empty one differs.
            empty = [*messages[:i], {"role": "assistant", "content": ""}]
            start = _num_common(whole, renderer.chat(chat, empty, add_generation_prompt=False))
        yield Text(prompt, whole[start:])


def _num_common(a: list[int], b: list[int]) -> int:
    """The number of tokens with which both begin."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def learn(proposer: NGramTrieProposer, text: Text, namespace: str | None = "") -> None:
    """Feed the text to the proposer as a request."""
    proposer.start("warming", text.prompt, namespace)
    read(proposer, {"warming": text.answer})
    proposer.finish("warming")
