"""The process of an engine: its answers, its failures and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import fresh_engine


def test_the_reason_of_a_failure_is_the_engine_s_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "WARNING 1-1 [a.py:1] ValueError: not this\n"
        "(EngineCore pid=1) ERROR 1-1 [core.py:9] Traceback (most recent call last):\n"
        "(EngineCore pid=1) ERROR 1-1 [core.py:9] ImportError: Arctic Inference is required\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    died = "RuntimeError: Engine core initialization failed. See root cause above."
    failure = fresh_engine.failure
    assert failure(died, 1, log) == "ImportError: Arctic Inference is required"
    assert failure("ValueError: bad\n  value", 1, log) == "ValueError: bad value"
    assert "signal 9" in failure("", -9, log)


def gone(pid: int) -> bool:
    """Wait until a killed process has ended; False after two minutes."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(1200):
        try:
            if "State:\tZ" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


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

    reason = '{"event": "failed", "reason": "ValueError: no room"}'
    script(f"""echo '{{"event": "ready"}}'; read line; echo '{reason}'; exit 1""")
    with (
        pytest.raises(fresh_engine.RunFailed, match="no room"),
        engine_of(tmp_path / "log") as engine,
    ):
        engine.wait_until_ready()
        engine.ask([0])


def test_an_interrupted_engine_is_ended(tmp_path: Path, script: Any) -> None:
    script(f"""sleep 600 & echo $! > {tmp_path}/pid; echo '{{"event": "warm-up"}}'; wait""")

    def interrupt(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), engine_of(tmp_path / "log", interrupt) as engine:
        engine.wait_until_ready()
    assert gone(int((tmp_path / "pid").read_text()))


def test_the_cpu_runtime_is_preloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libiomp5.so"
    library.touch()
    monkeypatch.setattr(fresh_engine.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(fresh_engine.sys, "platform", "linux")
    monkeypatch.setattr(fresh_engine, "is_cpu_build", lambda: True)
    assert str(library) in fresh_engine.cpu_runtime({})["LD_PRELOAD"].split(":")
    kept = fresh_engine.cpu_runtime({"LD_PRELOAD": "/x/libgomp.so.1"})["LD_PRELOAD"]
    assert kept.split(":")[0] == "/x/libgomp.so.1" and "libiomp5" not in kept
    monkeypatch.setattr(fresh_engine, "is_cpu_build", lambda: False)
    assert fresh_engine.cpu_runtime({"LD_PRELOAD": "/x/libgomp.so.1"}) == {}
