"""An engine on the simulated device."""

import json
from typing import Any

import pytest

from benchmarks.device import compare


@pytest.mark.slow
def test_asynchronous_steps_hide_the_host_and_drafts_are_accepted(tmp_path):
    """The host takes 5 ms more in each step, the device 20 ms. A host that read tokens before they
    have arrived would accept none."""
    path = tmp_path / "rows.json"
    argv = ["--device-ms", "20", "--host-delay-ms", "5", "--methods", "lookahead", "--steps"]
    argv += ["10", "--batch-sizes", "2", "--nodes", "4", "--graphs", "--json", str(path)]
    trace = tmp_path / "trace.json"
    assert compare.main([*argv, "--trace", str(trace)]) == 0
    [row] = json.loads(path.read_text())
    assert row["device_wait_us"] < 5e3 and row["host_us"] >= 5e3
    assert row["step_ms"] >= 20
    assert row["launches"] < 6
    assert 3 < row["nodes_sent"] <= 4 and 1.5 < row["tokens_per_step"] < 4
    check_trace(json.loads(trace.read_text())["traceEvents"])


def check_trace(events: list[dict[str, Any]]) -> None:
    """20 steps by station; the device runs one pass after another, each after its launch."""

    def inside(outer: dict[str, Any]) -> list[dict[str, Any]]:
        end = outer["ts"] + outer["dur"]
        return [e for e in host if outer["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end]

    def names_of(some: list[dict[str, Any]]) -> list[str]:
        return [event["name"] for event in some if event["name"] != "learn"]

    host = [event for event in events if event["tid"] == "host"]
    passes = [event for event in events if event["tid"] == "device"]
    steps = [event for event in host if event["name"] == "step"]
    assert len(steps) == 20 == len(passes)
    for step in steps:
        expected = ["step", "schedule", "begin", "place", "draft", "wait", "grow", "share out"]
        expected += ["launch", "sample", "keep", "update"]
        assert list(dict.fromkeys(names_of(inside(step)))) == expected
        (draft,) = (event for event in inside(step) if event["name"] == "draft")
        assert names_of(inside(draft)) == ["draft", "wait", "grow"]
        (keep,) = (event for event in inside(step) if event["name"] == "keep")
        assert "learn" in {event["name"] for event in inside(keep)}
    launches = [event["ts"] for event in host if event["name"] == "launch"]
    for launched, before, after in zip(launches[1:], passes, passes[1:], strict=False):
        assert after["ts"] >= launched - 1 and after["ts"] >= before["ts"] + before["dur"] - 1
