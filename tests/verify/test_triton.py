"""Runs the tests of Triton's kernels under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_triton_under_its_interpreter():
    """Triton asks for the interpreter when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
