"""Prompts whose answers copy: code edits, a file that grows over a conversation, second answers."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.prompt_files.edits import EDITS, append
from benchmarks.prompt_files.line import Line

Message = dict[str, str]

TURNS = 4
"""Of a conversation."""
FILE_PIECES = 2
"""Pieces of code in the file with which a conversation begins."""
TOKENS_PER_CHANGE = 12
"""A second answer differs from the first in about one token of this many."""


class Chat:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation that the assistant continues."""
        return list(
            self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def ids(self, text: str) -> list[int]:
        """The token ids of a text in the middle of another."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, text: str) -> list[int]:
        """The token ids of an answer, with the end of the sequence."""
        return [*self.ids(text), self._tokenizer.eos_token_id]


def code_of(answer: str) -> str:
    """The code in an answer: what is fenced by ``` if anything is."""
    inside = answer.partition("```")[2]
    if not inside:
        return answer.strip() + "\n"
    return inside.partition("\n")[2].rpartition("```")[0].strip() + "\n"


def fenced(code: str) -> str:
    """An answer that is nothing but code."""
    return f"```python\n{code}```"


def line(chat: Chat, category: str, messages: Sequence[Message], answer: str, before: str) -> Line:
    """One line of the file; its reference is the text before the edit, as an answer has it."""
    return {
        "category": category,
        "prompt_token_ids": chat.prompt(messages),
        "output_token_ids": chat.answer(answer),
        "reference_token_ids": chat.ids(before),
    }


def request(instruction: str, code: str) -> Message:
    """The user's message: an instruction and a whole file."""
    content = f"{instruction} Reply with the whole file.\n{fenced(code)}"
    return {"role": "user", "content": content}


def edits(chat: Chat, codes: Sequence[str], count: int, rng: random.Random) -> Iterator[Line]:
    """Single edits, `count` of each kind; prompt and reference have the code as it was.

    A piece of code in which an edit is impossible is passed over.
    """
    for kind, make in EDITS.items():
        made = 0
        for code in rng.sample(list(codes), len(codes)):
            if made < count and (edit := make(code, rng)):
                made += 1
                messages = [request(edit.instruction, code)]
                yield line(chat, kind, messages, fenced(edit.text), fenced(code))


def conversations(
    chat: Chat, codes: Sequence[str], count: int, rng: random.Random
) -> Iterator[Line]:
    """Conversations of `TURNS` turns over a file that grows: all first turns, then all second ones.

    A turn's prompt is the last turn's with its answer and a further instruction, its answer is the
    whole file after the edit, and its reference the file before. Every second turn appends a piece
    of code, the others make an edit.
    """
    talks: list[list[Message]] = [[] for _ in range(count)]
    files = ["\n\n".join(rng.sample(list(codes), FILE_PIECES)) for _ in range(count)]
    for turn in range(TURNS):
        for number in range(count):
            before = files[number]
            edit = EDITS[rng.choice(sorted(EDITS))](before, rng) if turn % 2 == 0 else None
            edit = edit or append(before, rng.choice(codes))
            files[number] = edit.text
            if turn == 0:
                talks[number].append(request(edit.instruction, before))
            else:
                content = f"{edit.instruction} Reply with the whole file."
                talks[number].append({"role": "user", "content": content})
            answer = fenced(edit.text)
            yield line(chat, f"turn {turn + 1}", talks[number], answer, fenced(before))
            talks[number].append({"role": "assistant", "content": answer})


def second_answers(
    recorded: Sequence[Line], vocabulary: int, count: int, rng: random.Random
) -> Iterator[Line]:
    """Recorded requests whose reference is an earlier answer, which the prompt does not have.

    The earlier answer is the recorded one, in which about one token of `TOKENS_PER_CHANGE` is
    replaced by a random one or left out.
    """
    for trace in recorded[:count]:
        earlier = []
        for token in trace["output_token_ids"]:
            draw = rng.randrange(2 * TOKENS_PER_CHANGE)
            if draw == 0:
                continue
            earlier.append(rng.randrange(3, vocabulary) if draw == 1 else token)
        yield {
            "category": "second answer",
            "prompt_token_ids": trace["prompt_token_ids"],
            "output_token_ids": trace["output_token_ids"],
            "reference_token_ids": earlier,
        }
