"""The tools for a machine with a GPU, as far as they run without one."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import accuracy, case, other_kernels
from benchmarks.gpu.case import depths_and_masks, tree_parents
from benchmarks.gpu.check import Limit
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.layout.paged_batch import CAUSAL
from lookahead_vllm.verify.layout.tree_batch import TreeBatch

ROOT = Path(__file__).parents[2]


# The tests on a GPU.


def test_on_a_gpu_sets_the_environment_of_what_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['TRITON_F32_DEFAULT'], *sys.argv[1:])")
    command = [sys.executable, "benchmarks/gpu/on_a_gpu.py", str(script), "--minutes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "ieee --minutes 2\n", done.stderr


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
    options = {"sliding_window": 40, "soft_cap": 5.0, "alibi_slopes": True, "sinks": True}
    mixed = case.Case([70, 0, 9], [33, 5, 12], causal=(2,), dtype=torch.float32, options=options)
    assert mixed.batch.firsts.tolist() == [0, 34, CAUSAL]
    assert mixed.error("reference") < mixed.max_error == 1e-5
    assert case.Case([20], [9], fp8=True, heads_first=True).error("reference") < 1e-2


def test_a_kernel_is_wrong_if_its_error_is_large_or_nan_or_it_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row_of(error: Any) -> dict[str, Any]:
        fake: Any = SimpleNamespace(error=error, max_error=1e-2)
        check = partial(accuracy.accuracy_row, lambda: fake, "triton")
        monkeypatch.setattr(accuracy, "checks", lambda: [("triton", "a case", check)])
        return accuracy.run(0)

    def raises(error: Exception) -> Any:
        raise error

    for error, is_wrong in ((1e-3, False), (0.5, True), (math.nan, True)):
        row = row_of(lambda impl, error=error: error)
        assert accuracy.is_wrong(row) == is_wrong and row["case"] == "a case"
    assert accuracy.is_wrong(row_of(lambda impl: raises(RuntimeError("it broke"))))
    left_out = row_of(lambda impl: raises(ValueError("not this one")))
    assert left_out["left_out"] == "not this one" and not accuracy.is_wrong(left_out)


@pytest.mark.parametrize("name", ["penalties", "bad words", "thinking", "latent", "choices"])
def test_the_other_kernels_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a CPU stand in for them."""
    monkeypatch.setattr(other_kernels, "DEVICE", "cpu")
    for found, check in other_kernels.checks():
        if name in found:
            row = check()
            assert row.get("error", 0) < row.get("bound", 1)


def test_processes_may_import_the_scripts() -> None:
    """Those of a pool do, under another name; a script that ran then would start pools again."""
    for name in ("gpu_check", "gpu_bundle"):
        script = str(ROOT / "scripts" / f"{name}.py")
        program = f"import runpy; runpy.run_path({script!r}, run_name='__mp_main__')"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_command_is_interrupted_when_the_time_is_up() -> None:
    program = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('known')"
    start = time.monotonic()
    assert Limit(1).run([sys.executable, "-c", program]) == "the time was up"
    assert time.monotonic() - start < 30
    assert Limit(None).run([sys.executable, "-c", "raise SystemExit(3)"]) == "failed (3)"
    assert Limit(60).run([sys.executable, "-c", ""]) == "well"


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
