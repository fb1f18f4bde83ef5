"""A stand-in for the command `vllm`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the fake; returns the file to which it writes its calls."""
    path = tmp_path / "vllm"
    fake = (Path(__file__).parents[1] / "support" / "fake_vllm.py").read_text()
    path.write_text(f"#!{sys.executable}\n{fake}")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path / "calls"
