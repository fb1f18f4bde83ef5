"""The tools for a machine with a GPU, as far as they run without one."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import accuracy, case
from benchmarks.gpu.case import depths_and_masks, tree_parents
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.gpu.paged_batch import CAUSAL
from lookahead_vllm.verify.tree_batch import TreeBatch

ROOT = Path(__file__).parents[2]


# The tests on a GPU.


def test_on_a_gpu_sets_the_environment_of_what_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; names = 'TRITON_F32_DEFAULT', 'VLLM_USE_V2_MODEL_RUNNER';"
        "print(*map(os.environ.get, names), *sys.argv[1:])"
    )
    command = [sys.executable, "benchmarks/gpu/on_a_gpu.py", str(script), "--minutes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    # No model runner: the rounds and tests of the second one would run on the first.
    assert done.stdout == "ieee None --minutes 2\n", done.stderr


# The inputs of gpu_check.py.


@pytest.mark.parametrize("nodes", [0, 1, 30, 31, 32, 128])
def test_masks_and_depths_are_those_of_the_engine(nodes: int) -> None:
    parents = tree_parents(nodes, random.Random(nodes))
    tree = DraftTree.from_lists(range(nodes), parents)
    batch = TreeBatch.build([tree], [0], [0], [0])
    depths, masks = depths_and_masks(parents, batch.masks.shape[1])
    assert depths == batch.depths.tolist() and masks == batch.masks.tolist()


def test_every_case_is_checked_against_attention_by_the_book(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(case, "DEVICE", "cpu")
    options = {"sliding_window": 40, "logits_soft_cap": 5.0, "alibi_slopes": True, "sinks": True}
    mixed = case.Case([70, 0, 9], [33, 5, 12], causal=(2,), dtype=torch.float32, options=options)
    assert mixed.batch.firsts.tolist() == [0, 34, CAUSAL]
    assert mixed.error("torch") < mixed.max_error == 1e-5
    assert case.Case([20], [9], fp8=True, heads_first=True).error("torch") < 1e-2


def test_a_kernel_is_wrong_if_its_error_is_large_or_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_right(error: float) -> bool:
        fake: Any = SimpleNamespace(error=lambda impl: error, max_error=1e-2)
        monkeypatch.setattr(accuracy, "kernel_cases", lambda: iter([("a case", fake)]))
        return accuracy.check_kernels({})

    assert is_right(1e-3) and not is_right(0.5) and not is_right(math.nan)


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
