"""The prompts of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import compare as bench
from benchmarks.prompts import PromptError, load_prompts, spread
from tests.support.files import jsonl


def no_tokenizer(line: dict[str, Any]) -> list[int]:
    raise AssertionError("ids were given")


def test_a_line_holds_ids_or_text_or_messages_and_a_category_or_a_suite(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "p.jsonl",
        {"prompt_token_ids": [1, 2], "category": "qa", "suite": "s"},
        "",
        {"prompt": "hello", "suite": "s"},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    prompts = load_prompts(path, lambda line: [7] if "prompt" in line else [8, 9])
    assert [(p.token_ids, p.category, p.line) for p in prompts] == [
        ([1, 2], "qa", 1),
        ([7], "s", 3),
        ([8, 9], "all", 4),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: an object with"),
        ({"text": "?"}, "line 2: an object with"),
        ({"prompt_token_ids": []}, "line 2: .*at least one token id"),
        ({"prompt_token_ids": [1, "2"]}, "line 2: .*at least one token id"),
        ({"prompt_token_ids": [2**31]}, "line 2: .*at least one token id"),
        ({"prompt": "no tokenizer"}, "line 2: cannot be tokenized: ids were given"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt_token_ids": [1]}, line)
    with pytest.raises(PromptError, match=message):
        load_prompts(path, no_tokenizer)


@pytest.mark.parametrize(
    ("categories", "limit", "expected"),
    [
        ("aaabbb", 4, [0, 1, 3, 4]),
        ("aaabbb", 3, [0, 1, 3]),
        ("abbbb", 4, [0, 1, 2, 3]),
        ("abc", 1, [0]),
        ("abab", None, [0, 1, 2, 3]),
        ("ab", 9, [0, 1]),
    ],
)
def test_a_limit_is_spread_evenly_in_file_order(
    categories: str, limit: int | None, expected: list[int]
) -> None:
    assert spread(categories, limit) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "line 2: --target-guided follows recorded answers, and there are no `output_tok"),
        (["--adversarial"], "leave one out"),
        (["--config", 'h={"method":"lookahead","proposer":"hybrid"}'], "h learns from what a mod"),
    ],
)
def test_target_guided_needs_recorded_answers(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt_token_ids": [1], "output_token_ids": [2, 3]}\n{"prompt_token_ids": [4]}\n'
    )
    first, second = load_prompts(path, no_tokenizer)
    assert (first.answer, second.answer) == ([2, 3], None)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--model", "m", "--prompts", str(path), "--target-guided", *more])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "'ngram' is not a method here that is lookahead"),
        ("with", "'with' is not a method here that is lookahead"),
        ("lookahead", "no line of"),
    ],
)
def test_references_need_lookahead_and_lines_that_have_them(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt_token_ids": [1]})
    with pytest.raises(SystemExit):
        bench.main(["--model", "m", "--prompts", str(path), "--references", given])
    assert message in capsys.readouterr().err
    path = jsonl(path, {"prompt_token_ids": [1], "reference_token_ids": [4, 5]})
    assert load_prompts(path, no_tokenizer)[0].reference == [4, 5]
