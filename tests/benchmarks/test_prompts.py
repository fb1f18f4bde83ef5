"""The prompts of the benchmarks."""

import random

import pytest

from benchmarks.engines import compare as bench
from benchmarks.prompt_files.edits import NEW_NAMES, rename
from benchmarks.prompts import load_prompts, spread
from tests.support.files import jsonl


def test_a_line_holds_ids_or_text_or_messages_and_a_category_or_a_suite(tmp_path):
    path = jsonl(
        tmp_path / "p.jsonl",
        {"prompt_token_ids": [1, 2], "category": "qa", "suite": "s", "output_token_ids": [3]},
        "",
        {"prompt": "hello", "suite": "s", "reference_token_ids": [4]},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    prompts = load_prompts(path, lambda line: [7] if "prompt" in line else [8, 9])
    assert [(p.token_ids, p.category, p.line) for p in prompts] == [
        ([1, 2], "qa", 1),
        ([7], "s", 3),
        ([8, 9], "all", 4),
    ]
    assert [(p.answer, p.reference) for p in prompts] == [([3], None), (None, [4]), (None, None)]


@pytest.mark.parametrize(
    ("categories", "limit", "expected"),
    [
        ("aaabbb", 4, [0, 1, 3, 4]),
        ("abbbb", 4, [0, 1, 2, 3]),
        ("abc", 1, [0]),
        ("ab", 9, [0, 1]),
    ],
)
def test_a_limit_is_spread_evenly_in_file_order(categories, limit, expected):
    assert spread(categories, limit) == expected


def test_proposers_that_learn_from_the_model_are_not_guided_without_its_choices(tmp_path, capsys):
    path = jsonl(tmp_path / "p.jsonl", {"prompt_token_ids": [1], "output_token_ids": [2, 3]})
    config = 'h={"method":"lookahead","proposer":"hybrid"}'
    with pytest.raises(SystemExit):
        bench.main(["--model", "m", "--prompts", str(path), "--target-guided", "--config", config])
    assert "h learns from what a mod" in capsys.readouterr().err


def test_a_guided_prompt_has_one_answer(tmp_path, capsys):
    lines = [{"prompt_token_ids": [1, 2], "output_token_ids": [3, i // 2]} for i in range(3)]
    path = jsonl(tmp_path / "p.jsonl", *lines)
    with pytest.raises(SystemExit):
        bench.main(["--model", "m", "--prompts", str(path), "--target-guided"])
    assert "line 3: --target-guided finds an answer by its prompt" in capsys.readouterr().err


def test_code_without_a_free_name_is_not_renamed():
    names = "old " + " ".join(NEW_NAMES)
    assert rename(3 * names, random.Random(0)) is None
    assert rename(3 * names.replace(NEW_NAMES[0], ""), random.Random(0)).text.count(NEW_NAMES[0])


@pytest.mark.parametrize("given", [{}, {"proposer": None}, {"proposer": "auto"}])
def test_a_guided_method_drafts_from_the_trie_unless_it_names_a_proposer(given):
    guided = bench.without_choices({"method": "lookahead", "budget": 64, **given})
    assert guided == {"method": "lookahead", "budget": 64, "proposer": "ngram_trie"}
    named = {"method": "lookahead", "proposer": "jacobi_window"}
    for config in (named, {"method": "suffix"}, None):
        assert bench.without_choices(config) == config
