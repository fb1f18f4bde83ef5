"""Files of prompts that copy, and of prompts with long contexts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prompt_files import make
from benchmarks.prompt_files.copying import TURNS
from tests.support.files import jsonl
from tests.support.tokenizer import save_tokenizer

CODE = """def add(left, right):
    total = left
    # A subtotal is no total.
    total = total + right
    return total
"""


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def copying(tmp_path: Path) -> tuple[list[str], Any]:
    """A command line without `--out`, and the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path))
    codes = [CODE.replace("total", name) for name in ("some", "whole", "result")]
    answers = [f"```python\n{code}```" for code in codes]
    code = jsonl(
        tmp_path / "code.jsonl",
        *(
            {"prompt_token_ids": [5], "output_token_ids": tokenizer(a)["input_ids"]}
            for a in answers
        ),
    )
    recorded = {"prompt_token_ids": [5], "output_token_ids": list(range(5, 105))}
    answered = jsonl(tmp_path / "answers.jsonl", recorded, recorded, recorded)
    command = ["copying", "--model", str(tmp_path), "--code", str(code), "--count", "2"]
    return [*command, "--answers", str(answered)], tokenizer


def test_prompts_that_copy_have_the_text_before_the_edit_as_reference(
    copying: tuple[list[str], Any], tmp_path: Path
) -> None:
    command, tokenizer = copying
    out = tmp_path / "out.jsonl"
    assert make.main([*command, "--out", str(out)]) == 0
    lines = read(out)
    kinds = ["rename", "delete", "insert", *(f"turn {i + 1}" for i in range(TURNS))]
    assert [line["category"] for line in lines] == [
        k for k in [*kinds, "second answer"] for _ in "ab"
    ]
    for line in lines[:-2]:
        prompt, answer, before = (
            tokenizer.decode(line[f"{name}_token_ids"], skip_special_tokens=True)
            for name in ("prompt", "output", "reference")
        )
        assert before in prompt and answer not in prompt
        assert answer.startswith("```python\n") and answer != before
        assert line["output_token_ids"][-1] == tokenizer.eos_token_id
    turns = [[line for line in lines if line["category"] == f"turn {i + 1}"] for i in range(TURNS)]
    for last, following in itertools.pairwise(turns):
        for one, two in zip(last, following, strict=True):
            said = [*one["prompt_token_ids"], *one["output_token_ids"][:-1]]
            assert two["prompt_token_ids"][: len(said)] == said  # prefix caching finds it
            assert two["reference_token_ids"] == one["output_token_ids"][:-1]
    for second in lines[-2:]:
        earlier = second["reference_token_ids"]
        assert second["output_token_ids"] == list(range(5, 105)) != earlier
        assert 80 < len(set(earlier) & set(range(5, 105))) < 100


@pytest.mark.parametrize("shared", [False, True])
def test_long_contexts_are_other_requests_up_to_the_length(shared: bool, tmp_path: Path) -> None:
    recorded = [
        {"prompt_token_ids": [1, 10 + i, 2], "output_token_ids": [50 + i, 2]} for i in range(8)
    ]
    out = tmp_path / "out.jsonl"
    command = ["long", "--recorded", str(jsonl(tmp_path / "in.jsonl", *recorded)), "--count", "3"]
    assert make.main([*command, "--tokens", "33", "--out", str(out)] + ["--shared"] * shared) == 0
    lines = read(out)
    fronts = [line["prompt_token_ids"][:30] for line in lines]
    for line, front, trace in zip(lines, fronts, recorded, strict=False):
        assert line["prompt_token_ids"] == front + trace["prompt_token_ids"]
        assert line["output_token_ids"] == trace["output_token_ids"]
        pieces = [front[k : k + 5] for k in range(0, 30, 5)]
        others = [[*other.values()] for other in recorded if other is not trace]
        assert all([piece[:3], piece[3:]] in others for piece in pieces)
    assert (fronts[0] == fronts[1] == fronts[2]) is shared
