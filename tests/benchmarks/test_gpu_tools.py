"""The tools for a machine with a GPU, as far as they run without one."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import accuracy, case, environment, gpu_kernels, plain
from benchmarks.gpu.case import depths_and_masks, tree_parents
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.gpu.paged_batch import CAUSAL
from lookahead_vllm.verify.tree_batch import TreeBatch

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "benchmarks" / "gpu"
# A check on a GPU machine calls these files by their names.
NAMES = ("environment", "gpu_kernels", "on_a_gpu", "plain", "verdict")


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / f"{name}.py"), *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_no_tool_hides_a_module_when_its_folder_is_on_the_path() -> None:
    stems = {path.stem for path in TOOLS.glob("*.py")} - {"__init__"}
    assert stems >= set(NAMES)
    assert not [stem for stem in stems if importlib.util.find_spec(stem) is not None]


# Kernels.


class Case:
    """A case with a fixed error for each implementation."""

    max_error = 1e-2

    def __init__(self, **errors: float | Exception) -> None:
        self.errors = errors

    def error(self, impl: str) -> float:
        error = self.errors.get(impl, 1e-3)
        if isinstance(error, Exception):
            raise error
        return error


CASES = [
    ("good", Case()),
    ("wrong", Case(triton=0.5)),
    ("nan", Case(triton=float("nan"))),
    ("broken", Case(triton=RuntimeError("illegal address"))),
]


def test_kernels_are_checked_in_shares_and_go_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu.case.kernel_cases", lambda: iter(CASES))
    shares = [list(gpu_kernels.check_share(number, 2)) for number in range(2)]
    cases = [{row["case"] for row in rows} for rows in shares]
    assert cases == [{"good", "nan"}, {"wrong", "broken"}]
    rows = [row for share in shares for row in share]
    wrong = [(row["case"], row["impl"]) for row in rows if accuracy.is_wrong(row)]
    assert sorted(wrong) == [("broken", "triton"), ("nan", "triton"), ("wrong", "triton")]
    assert not gpu_kernels.report(rows, failed=0)
    assert "WRONG: triton, broken: RuntimeError: illegal address" in capsys.readouterr().out
    good = [row for row in rows if row["impl"] == "torch"]
    assert gpu_kernels.report(good, failed=0) and not gpu_kernels.report(good, failed=1)


# Plain vLLM.


def test_the_next_level_follows_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, level_file = tmp_path / "out.json", tmp_path / "level"

    def try_level(name: str, argv: Any) -> int | str:
        if name != "first runner":
            return "too slow"
        out.write_text(json.dumps({"text": "hello"}))
        return 0

    monkeypatch.setattr(plain, "try_level", try_level)
    assert plain.main(["model", str(tmp_path / "prompts"), str(level_file), str(out)]) == 0
    assert level_file.read_text() == "env VLLM_USE_V2_MODEL_RUNNER=0\n"
    results = json.loads(out.read_text())
    assert results["default"]["code"] == "too slow" and results["first runner"]["text"] == "hello"


# Results.


def test_a_benchmark_is_exact_if_every_method_ran_and_no_answer_differs(tmp_path: Path) -> None:
    def status(command: str, **changes: Any) -> int:
        row = {"method": "ngram", "batch_size": 8, "tokens_per_s": 9.5, "prompts": 12}
        path = tmp_path / "bench.json"
        path.write_text(json.dumps({"rows": [{**row, "mismatches": 0, **changes}]}))
        return run_tool("verdict", command, str(path)).returncode

    assert status("ran") == status("ran", mismatches=2) == status("exact") == 0
    assert status("ran", tokens_per_s=None) == status("exact", mismatches=2) == 1


def test_the_modules_that_are_loaded_exist() -> None:
    names = [f"vllm.v1.worker.{name}" for name in environment.RUNNERS]
    names += [f"lookahead_vllm.engine.{name}" for name in environment.LOOKAHEAD]
    for package, _, rest in (name.partition(".") for name in names):
        [folder] = importlib.util.find_spec(package).submodule_search_locations
        assert Path(folder, f"{rest.replace('.', '/')}.py").is_file(), rest


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
