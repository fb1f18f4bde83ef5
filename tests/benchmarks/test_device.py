"""An engine on the simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.device import compare


@pytest.mark.slow
def test_asynchronous_steps_hide_the_host_and_drafts_are_accepted(tmp_path: Path) -> None:
    """The host takes 5 ms more in each step, the device 20 ms. A host that read tokens before they
    have arrived would accept none."""
    path = tmp_path / "rows.json"
    argv = ["--device-ms", "20", "--host-delay-ms", "5", "--methods", "lookahead", "--steps"]
    argv += ["10", "--batch-sizes", "2", "--nodes", "4", "--graphs", "--json", str(path)]
    assert compare.main(argv) == 0
    [row] = json.loads(path.read_text())
    assert row["device_wait_us"] < 5e3 and row["host_us"] >= 5e3
    assert row["step_ms"] >= 20
    assert row["launches"] < 6
    assert 3 < row["nodes_sent"] <= 4 and 1.5 < row["tokens_per_step"] < 4
