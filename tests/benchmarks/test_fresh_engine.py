"""The process of an engine: its answers, its failures and its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import fresh_engine


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the shell script that runs instead of the process with the engine."""

    def write(text: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(fresh_engine.sys, "executable", str(path))

    return write


def engine_of(log: Path, on_event: Callable[[dict[str, Any]], None] = lambda _: None) -> Any:
    return fresh_engine.FreshEngine("a.module", {"max_tokens": 1}, {}, log, on_event)


def test_an_engine_answers_until_its_block_ends(tmp_path: Path, script: Any) -> None:
    script(f"""cd {tmp_path}; echo "$@" > arguments
        echo '{{"event": "warm-up"}}'; echo '{{"event": "ready"}}'
        echo 'local_rank=0, core ids=[0, 1]' >&2
        while read line; do echo '{{"event": "answer", "answer": '$line'}}'; done; touch left""")
    events: list[dict[str, Any]] = []
    with engine_of(tmp_path / "log", events.append) as engine:
        engine.wait_until_ready()
        assert engine.ask([0, 2]) == [0, 2]
        assert engine.ask({"a": 1}) == {"a": 1}
    assert events == [{"event": "warm-up"}]
    assert (tmp_path / "left").exists()
    assert engine.bound_cores() == [0, 1]
    assert (tmp_path / "arguments").read_text() == f"-m a.module {tmp_path / 'log.job.json'}\n"
    assert json.loads((tmp_path / "log.job.json").read_text()) == {"max_tokens": 1}


def test_an_engine_that_dies_is_reported(tmp_path: Path, script: Any) -> None:
    script("""echo 'it hurts' >&2; exit 3""")
    with (
        pytest.raises(fresh_engine.RunFailed, match="exit status 3"),
        engine_of(tmp_path / "log") as engine,
    ):
        engine.wait_until_ready()
    assert (tmp_path / "log").read_text() == "it hurts\n"
