"""Engines on the simulated device: what plain vLLM and lookahead let it wait for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.device import compare

pytestmark = pytest.mark.slow

DEVICE_MS, DELAY_MS = 20, 5


@pytest.fixture(scope="module")
def by_method(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows by method; all hosts are delayed by DELAY_MS in each step."""
    path = tmp_path_factory.mktemp("device") / "rows.json"
    argv = ["--device-ms", str(DEVICE_MS), "--host-delay-ms", str(DELAY_MS), "--json", str(path)]
    argv += ["--methods", "plain_v1,lookahead_v2", "--batch-sizes", "2", "--nodes", "4"]
    assert compare.main([*argv, "--steps", "10"]) == 0
    return {row["method"]: row for row in json.loads(path.read_text())}


def test_a_synchronous_step_waits_for_the_host(by_method: dict[str, Any]) -> None:
    row = by_method["plain_v1"]
    assert row["device_wait_us"] >= 1e3 * DELAY_MS
    assert row["step_ms"] >= DEVICE_MS + DELAY_MS
    assert row["by_piece_us"]["schedule"] >= 1e3 * DELAY_MS
    assert (row["nodes_sent"], row["tokens_per_step"]) == (0, 1)


def test_an_asynchronous_step_hides_the_host(by_method: dict[str, Any]) -> None:
    row = by_method["lookahead_v2"]
    assert row["device_wait_us"] < 1e3 * DELAY_MS
    assert row["by_piece_us"]["schedule"] < 1e3 * DELAY_MS / 2
    assert row["step_ms"] >= DEVICE_MS
    assert row["host_ms"] >= DELAY_MS


def test_drafts_are_sent_and_accepted(by_method: dict[str, Any]) -> None:
    row = by_method["lookahead_v2"]
    assert row["by_piece_us"]["draft"] > 0
    assert 3 < row["nodes_sent"] <= 4
    assert 1.5 < row["tokens_per_step"] < 4
