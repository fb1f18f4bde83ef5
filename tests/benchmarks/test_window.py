"""The benchmark of step compression: its settings, its table and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engines import window as bench
from benchmarks.engines.generate import Generation, Turn
from lookahead_vllm.draft.options import LookaheadOptions


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt_token_ids": [1, 2], "category": name} for name in ("qa", "rag")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def measurement(prompts: Path, *more: str) -> bench.Measurement:
    arguments = ["--model", "m", "--prompts", str(prompts), *more]
    return bench.Measurement(bench.parser().parse_args(arguments))


def test_a_server_accepts_every_setting() -> None:
    for settings in bench.SETS.values():
        for setting in settings:
            given = {key: value for key, value in setting.config.items() if key != "method"}
            LookaheadOptions.from_dict(given).for_model(7e9)


def test_a_setting_in_two_sets_is_measured_once_with_the_papers_figure(prompts: Path) -> None:
    found = measurement(prompts, "--sets", "table,scaling").settings
    assert len(found) == len(bench.SETS["table"]) + len(bench.SETS["scaling"])
    assert found["(5, 15, 15)"].paper == 1.96
    assert found["(5, 1, 30), with prompt"].config["pool_from_prompt"]


def test_s_is_tokens_a_step_without_the_prefills(prompts: Path) -> None:
    measured = measurement(prompts, "--sets", "table")
    answers = [
        Generation([1] * 9, steps=4, draft_tokens=40),
        Generation([1] * 7, steps=6, draft_tokens=20),
    ]
    measured.turns["(5, 15, 15)"] = Turn(answers, 1.0, 1.0, "float32", {})
    (row,) = measured.rows()
    assert row["S"] == 1.4 and row["nodes"] == 6 and row["by_category"] == {"qa": 2.0, "rag": 1.0}
    assert "| (5, 15, 15) | 1.40 |  1.96 |" in bench.table([row])
