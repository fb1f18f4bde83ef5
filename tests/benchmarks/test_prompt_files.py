"""Files of prompts that copy, and of prompts with long contexts."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prompt_files import make
from benchmarks.prompt_files.copying import TURNS, code_of
from benchmarks.prompt_files.edits import append, delete_line, insert_line, rename
from tests.support.files import jsonl
from tests.support.tokenizer import save_tokenizer

CODE = """def add(left, right):
    total = left
    # A subtotal is no total.
    total = total + right
    return total
"""


def test_a_rename_replaces_whole_names_everywhere() -> None:
    edit = rename(CODE, random.Random(0))
    assert edit is not None
    old, new = re.findall(r"`(\w+)`", edit.instruction)
    assert old == "total" and new not in CODE  # the only name that occurs three times
    assert edit.text == re.sub(r"(?<!sub)total", new, CODE)
    assert rename("def f(): return 1\n", random.Random(0)) is None
    assert rename("if if if len len len", random.Random(0)) is None  # Python's own names stay


def test_lines_are_deleted_and_inserted_where_the_instruction_says() -> None:
    lines = CODE.splitlines()
    for seed in range(5):
        edit = delete_line(CODE, random.Random(seed))
        assert edit is not None
        gone = edit.instruction.split("`")[1]
        place = [line.strip() for line in lines].index(gone)
        assert edit.text.splitlines() == lines[:place] + lines[place + 1 :]

        edit = insert_line(CODE, random.Random(seed))
        comment, before = edit.instruction.split("`")[1::2]
        (place,) = [i for i, line in enumerate(edit.text.splitlines()) if comment in line]
        after = edit.text.splitlines()[place + 1]
        assert after.strip() == before
        assert edit.text.splitlines()[place] == after[: -len(after.lstrip())] + comment
        assert edit.text.replace(edit.text.splitlines(True)[place], "", 1) == CODE
    assert delete_line("x = 1\n", random.Random(0)) is None
    assert append(CODE, "x = 1\n").text == CODE + "\n\nx = 1\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Here it is:\n```\nx = 1\n\n```\nDone.", "x = 1\n"),
        ("\nx = 1", "x = 1\n"),
    ],
)
def test_the_code_of_an_answer_is_what_is_fenced(answer: str, code: str) -> None:
    assert code_of(answer) == code


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
    out, again, other = (tmp_path / f"{name}.jsonl" for name in "abc")
    assert make.main([*command, "--out", str(out)]) == 0
    make.main([*command, "--out", str(again)])
    make.main([*command, "--out", str(other), "--seed", "1"])
    assert out.read_text() == again.read_text() != other.read_text()
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
