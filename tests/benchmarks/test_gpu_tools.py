"""The tools for a machine with a GPU, as far as they run without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import case, other_kernels
from lookahead_vllm.verify.layout.paged_batch import CAUSAL

ROOT = Path(__file__).parents[2]


# The tests on a GPU.


# The inputs of gpu_check.py.


def test_every_case_is_checked_against_attention_by_the_book(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(case, "DEVICE", "cpu")
    options = {"sliding_window": 40, "soft_cap": 5.0, "alibi_slopes": True, "sinks": True}
    mixed = case.Case([70, 0, 9], [33, 5, 12], causal=(2,), dtype=torch.float32, options=options)
    assert mixed.batch.firsts.tolist() == [0, 34, CAUSAL]
    assert mixed.error("reference") < mixed.max_error == 1e-5
    assert case.Case([20], [9], fp8=True, heads_first=True).error("reference") < 1e-2


@pytest.mark.parametrize("name", ["penalties", "bad words", "thinking", "latent", "choices"])
def test_the_other_kernels_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a CPU stand in for them."""
    monkeypatch.setattr(other_kernels, "DEVICE", "cpu")
    for found, check in other_kernels.checks():
        if name in found:
            row = check()
            assert row.get("error", 0) < row.get("bound", 1)


def test_it_needs_only_torch_and_triton_and_reports_a_missing_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = str(ROOT / "scripts" / "gpu_check.py")
    program = f"""
import runpy, sys

class Others:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "numba", "llvmlite", "transformers", "matplotlib"):
            raise ImportError(name)

sys.meta_path.insert(0, Others())
sys.argv = [{script!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "there is no CUDA device here" in done.stderr
