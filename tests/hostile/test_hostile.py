"""Hostile clients harm nobody. No time decides here; `scripts/hostile.py` has times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import cache_files
from tests.hostile.play import Plan, play


@pytest.mark.parametrize("name", cache_files.FILES)
def test_a_bad_cache_file_is_set_aside(name: str, tmp_path: Path) -> None:
    assert cache_files.wrong_with(name, tmp_path) == []


def test_a_good_cache_file_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"good": lambda path: path.write_bytes(path.with_name("good").read_bytes())}
    monkeypatch.setattr(cache_files, "FILES", good)
    loaded, warned = cache_files.wrong_with("good", tmp_path)
    assert loaded == "it was loaded" and "warned 0 times" in warned


@pytest.mark.slow
def test_hostile_clients_harm_nobody(tmp_path: Path) -> None:
    report = play(Plan.quick(seed=1), tmp_path)
    print(report.table())
    assert not report.violations, "\n".join(report.violations)
    assert report.memory["lookahead"][1] < 0.25
    assert report.namespaces > 100 and report.good_answers > 100
