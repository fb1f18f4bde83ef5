"""The prompts of a benchmark: one JSON object a line."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_vllm.json_lines import are_token_ids, read_json_lines

Tokenize = Callable[[dict[str, Any]], list[int]]
"""Turns the `prompt` or the `messages` of a line into token ids."""


class PromptError(ValueError):
    """The prompts cannot be used; the message names the file, the line and what to write."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: its token ids, its category in the tables, and its line in the file."""

    token_ids: list[int]
    category: str
    line: int
    answer: list[int] | None = None
    """The token ids that were recorded as its answer."""
    reference: list[int] | None = None
    """The token ids of a text that the answer may copy from."""


def load_prompts(path: Path, tokenize: Tokenize, limit: int | None = None) -> list[Prompt]:
    """Read a JSON-lines file.

    Each line is an object with `prompt_token_ids` (a list), `prompt` (text) or `messages` (a
    chat). `category`, or else `suite`, the recorded answer, `output_token_ids`, and a text that the
    answer may copy from, `reference_token_ids`, are optional. With a `limit`, so many lines are
    chosen, spread evenly over the categories. `tokenize` is called for those that have no
    `prompt_token_ids`. PromptError if the file is missing or empty, or a line is no such object.
    """
    if not path.is_file():
        raise PromptError(f"--prompts: there is no file {path}")
    lines = [
        (number, _checked_line(path, number, value))
        for number, value in read_json_lines(path, PromptError)
    ]
    if not lines:
        raise PromptError(f"{path} is empty: one JSON object a line is expected")
    categories = [str(line.get("category") or line.get("suite") or "all") for _, line in lines]
    return [
        Prompt(
            _token_ids(path, lines[i], tokenize),
            categories[i],
            lines[i][0],
            _optional_ids(path, lines[i], "output_token_ids"),
            _optional_ids(path, lines[i], "reference_token_ids"),
        )
        for i in spread(categories, limit)
    ]


def spread(categories: Sequence[str], limit: int | None) -> list[int]:
    """Indices of `limit` items, in order, spread evenly over the categories."""
    if limit is None or limit >= len(categories):
        return list(range(len(categories)))
    queues: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        queues.setdefault(category, []).append(index)
    ranked = [(rank, index) for queue in queues.values() for rank, index in enumerate(queue)]
    ranked.sort(key=lambda item: item[0])  # stable: every category's first, every second, ...
    return sorted(index for _, index in ranked[:limit])


def context_length(prompts: Sequence[Prompt], max_tokens: int, model: str) -> int:
    """Positions for the longest prompt, its answer and a draft, rounded up to a multiple of 128.

    At most the model's own number of positions, where its folder has a config.json.
    """
    needed = max(len(prompt.token_ids) for prompt in prompts) + max_tokens + 64
    rounded = -(-needed // 128) * 128
    path = Path(model) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    return min(rounded, int(limit)) if limit else rounded


def _checked_line(path: Path, number: int, line: Any) -> dict[str, Any]:
    if not isinstance(line, dict) or not {"prompt_token_ids", "prompt", "messages"} & line.keys():
        raise PromptError(
            f"{path}, line {number}: an object with `prompt_token_ids`, `prompt` or `messages` "
            "is expected"
        )
    return line


def _token_ids(path: Path, line: tuple[int, dict[str, Any]], tokenize: Tokenize) -> list[int]:
    number, content = line
    ids = content.get("prompt_token_ids")
    if ids is None:
        try:
            ids = tokenize(content)
        except Exception as error:
            raise PromptError(f"{path}, line {number}: cannot be tokenized: {error}") from error
    return _checked(path, number, "prompt_token_ids", ids)


def _optional_ids(path: Path, line: tuple[int, dict[str, Any]], name: str) -> list[int] | None:
    number, content = line
    ids = content.get(name)
    return None if ids is None else _checked(path, number, name, ids)


def _checked(path: Path, number: int, name: str, ids: Any) -> list[int]:
    if not are_token_ids(ids) or not ids:
        raise PromptError(
            f"{path}, line {number}: `{name}` must be a list of at least one token id"
        )
    return ids


def model_tokenizer(model: str) -> Tokenize:
    """Tokenize with the model's own tokenizer and chat template; loaded when first needed."""
    loaded: Any = None

    def tokenize(line: dict[str, Any]) -> list[int]:
        nonlocal loaded
        if loaded is None:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(model)
        if "prompt" in line:
            return list(loaded(line["prompt"])["input_ids"])
        return list(
            loaded.apply_chat_template(
                line["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    return tokenize


def as_texts(prompts: Sequence[Prompt], model: str) -> list[str]:
    """The prompts decoded by the model's tokenizer, special tokens included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.decode(prompt.token_ids) for prompt in prompts]
