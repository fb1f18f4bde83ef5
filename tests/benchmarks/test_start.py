"""The start of a server, phase by phase, with a fake `vllm`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.serving.server import ServerError
from benchmarks.start import compare as script
from benchmarks.start.phases import ENDS, LogFollower, durations


def test_a_phase_ends_with_its_first_line_and_one_without_a_line_is_part_of_the_next() -> None:
    ends = {"command": 5.0, "load model": 11.0, "HTTP": 12.5}
    assert durations(1.0, ends) == {"command": 4.0, "load model": 6.0, "HTTP": 1.5}
    assert sum(durations(1.0, ends).values()) == 12.5 - 1.0


def test_the_log_is_followed_as_it_grows_and_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with LogFollower(log) as follower, log.open("w") as file:
        begin = time.monotonic()
        file.write("INFO non-default args: {}\nINFO Initializing a V1 LLM")
        file.flush()
        while "command" not in follower.ends:
            assert time.monotonic() < begin + 30
        seen = follower.ends["command"]
        file.write(" engine (v1)\nINFO non-default args again\nApplication startup complete\n")
    assert list(follower.ends) == ["command", "config, engine process", "HTTP"]
    assert follower.ends["command"] == seen
    assert begin <= seen <= follower.ends["config, engine process"]


def test_vllm_still_logs_the_lines_that_end_the_phases() -> None:
    import vllm as real

    import lookahead_vllm

    folders = [Path(next(iter(module.__path__))) for module in (real, lookahead_vllm)]
    homes = ["v1/engine/core.py", "v1/worker", "model_executor/model_loader", "entrypoints"]
    files = [folders[0] / home for home in homes] + [folders[1] / "engine/worker"]
    texts = [
        path.read_text()
        for file in files
        for path in ([file] if file.is_file() else file.rglob("*.py"))
    ]
    for phase, pattern in ENDS.items():
        if phase != "HTTP":  # uvicorn's
            assert any(re.search(pattern, text) for text in texts), phase


def test_cold_and_warm_starts_take_turns(
    tmp_path: Path, vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert script.main(["--model", "m", "--times", "2", "--json", str(out)]) == 0
    started = [call.split()[2] for call in vllm.read_text().splitlines()]
    plain, ours = ["none"] * 2, ["lookahead"] * 2
    assert started == ["none", *plain, *ours, *ours, *plain]  # the first one is not measured
    rows = json.loads(out.read_text())["rows"]
    assert {(row["method"], row["kind"], len(row["starts"])) for row in rows} == {
        (method, kind, 2) for method in ("none", "lookahead") for kind in ("cold", "warm")
    }
    for row in rows:
        has_cost = ["cost of a step" in phases for phases in row["starts"]]
        assert has_cost == [row["method"] == "lookahead"] * 2
    printed = capsys.readouterr().out
    assert re.search(r"^lookahead, cold: [+-]\d\.\d s .* in 2 rounds", printed, re.M)
    assert "| whole " in printed and "| config, engine process " in printed


def test_warm_starts_alone_share_one_folder(
    tmp_path: Path, vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["--model", "m", "--times", "2", "--warm-only", "--methods", "none"])
    assert len(vllm.read_text().splitlines()) == 4  # two unmeasured
    assert "none, cold" not in capsys.readouterr().out


def test_a_server_that_does_not_start_loses_no_measurement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    four = [{"command": float(seconds)} for seconds in range(4)]
    starts = Mock(side_effect=[*four, ServerError("the server did not start")])
    monkeypatch.setattr(script, "start", starts)
    assert script.main(["--model", "m", "--methods", "none", "--times", "3"]) == 1
    captured = capsys.readouterr()
    assert "the server did not start" in captured.err
    whole = re.search(r"^\| whole .*\|$", captured.out, re.M)
    assert whole and "–" in whole[0] and "none, warm" in captured.out
