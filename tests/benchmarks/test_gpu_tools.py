"""The tools for a machine with a GPU, as far as they run without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import accuracy, environment, gpu_kernels, plain

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
    ("good", Case(xformers=ValueError("no sinks"))),
    ("wrong", Case(triton=0.5)),
    ("nan", Case(triton=float("nan"))),
    ("broken", Case(triton=RuntimeError("illegal address"))),
]


def test_kernels_are_checked_in_shares_and_go_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu.case.kernel_cases", lambda: iter(CASES))
    shares = [list(gpu_kernels.check_share(number, 2)) for number in range(2)]
    assert [{row["case"] for row in rows} for rows in shares] == [
        {"good", "nan"},
        {"wrong", "broken"},
    ]
    rows = [row for share in shares for row in share]
    wrong = [(row["case"], row["impl"]) for row in rows if accuracy.is_wrong(row)]
    assert sorted(wrong) == [("broken", "triton"), ("nan", "triton"), ("wrong", "triton")]
    assert not gpu_kernels.report(rows, failed=0)
    printed = capsys.readouterr().out
    assert "WRONG: triton, wrong: 5.00e-01, where 1e-02 is allowed" in printed
    assert "WRONG: triton, broken: RuntimeError: illegal address" in printed
    assert "torch: 4 cases, the largest error at 0.10 of what is allowed" in printed
    good = [row for row in rows if row["impl"] == "torch"]
    assert gpu_kernels.report(good, failed=0)
    assert not gpu_kernels.report(good, failed=1)
    assert not gpu_kernels.report([], failed=0)


def test_rows_are_written_as_soon_as_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_early() -> Iterator[Any]:
        yield from CASES[:2]
        raise SystemExit("the machine's time is over")

    out = tmp_path / "share"
    results: dict[str, Any] = {}
    monkeypatch.setattr("benchmarks.gpu.case.kernel_cases", ends_early)
    with pytest.raises(SystemExit):
        gpu_kernels.main([str(ROOT), str(out), "1", "0"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["case"] for row in rows} == {"good", "wrong"}
    monkeypatch.setattr(accuracy, "kernel_cases", ends_early)
    with pytest.raises(SystemExit):
        accuracy.check_kernels(results)
    assert {row["case"] for row in results["kernels"]} == {"good", "wrong"}


def test_check_kernels_reports_what_is_wrong_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "kernel_cases", lambda: iter(CASES[:2]))
    results: dict[str, Any] = {}
    assert not accuracy.check_kernels(results)
    assert len(results["kernels"]) == 6
    printed = capsys.readouterr().out
    assert "xformers: 1 cases right to within 0.10 of what is allowed, 1 left out" in printed
    monkeypatch.setattr(accuracy, "kernel_cases", lambda: iter(CASES[:1]))
    assert accuracy.check_kernels(results)


# Plain vLLM.


def test_a_level_is_written_as_lines_and_the_next_one_follows_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, level_file = tmp_path / "out.json", tmp_path / "level"
    tried = []

    def try_level(name: str, argv: Any) -> int | str:
        tried.append(name)
        if name != "no compilation":
            return "too slow" if name == "default" else 1
        out.write_text(json.dumps({"text": "hello"}))
        return 0

    monkeypatch.setattr(plain, "try_level", try_level)
    arguments = ["model", str(tmp_path / "prompts"), str(level_file), str(out)]
    assert plain.main(arguments) == 0
    assert tried == ["default", "first runner", "triton attention", "no compilation"]
    assert level_file.read_text() == (
        'compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}\n'
    )
    results = json.loads(out.read_text())
    assert results["default"]["code"] == "too slow"
    assert results["no compilation"]["text"] == "hello"
    assert plain.level_lines(plain.LEVELS["first runner"]) == "env VLLM_USE_V2_MODEL_RUNNER=0\n"
    assert plain.level_lines({}) == ""
    monkeypatch.setattr(plain, "try_level", lambda name, argv: 1)
    assert plain.main(arguments) == 1


def test_engine_arguments_follow_the_folder(tmp_path: Path) -> None:
    args = plain.engine_args(str(tmp_path), {"enforce_eager": True})
    assert args["load_format"] == "dummy" and args["skip_tokenizer_init"] and args["enforce_eager"]
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    assert not {"load_format", "skip_tokenizer_init"} & plain.engine_args(str(tmp_path), {}).keys()


def test_answers_are_compared_up_to_their_first_difference() -> None:
    assert plain.common_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert plain.common_prefix([1, 2], [1, 2, 3]) == 2


# Results.


def bench_row(**changes: Any) -> dict[str, Any]:
    row = {
        "method": "lookahead", "batch_size": 8, "tokens_per_s": 120.4, "ratio": 1.5, "prompts": 12,
        "tokens_per_step": 2.0, "draft_tokens_per_step": 9.5, "mismatches": 0, "error": None,
    }  # fmt: skip
    return {**row, **changes}


def test_a_benchmark_ran_if_every_method_has_a_speed_and_is_exact_if_no_answer_differs(
    tmp_path: Path,
) -> None:
    def status(command: str, *rows: dict[str, Any]) -> tuple[int, str]:
        path = tmp_path / "bench.json"
        path.write_text(json.dumps({"rows": rows}))
        done = run_tool("verdict", command, str(path))
        return done.returncode, done.stdout

    assert status("ran", bench_row()) == status("exact", bench_row()) == (0, "")
    failed = status("ran", bench_row(), bench_row(method="ngram", tokens_per_s=None))
    assert failed == (1, "did not run: ngram, batch 8\n")
    assert status("ran", bench_row(mismatches=2))[0] == 0
    assert status("exact", bench_row(mismatches=2)) == (
        1,
        "lookahead: 2 of 12 answers differ\n",
    )


# Libraries.


def test_the_environment_reports_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        raise ImportError("undefined symbol")

    assert environment.passes("numba", environment.numba_compiles)
    assert not environment.passes("vllm", fails)
    printed = capsys.readouterr().out
    assert "well    numba: a sum of 45" in printed
    assert "FAILED  vllm: ImportError: undefined symbol" in printed


def test_the_modules_that_are_loaded_exist() -> None:
    for name in environment.RUNNERS:
        assert importlib.util.find_spec(f"vllm.v1.worker.{name}")
    assert "worker.v2.gpu_worker" in environment.LOOKAHEAD
    for name in environment.LOOKAHEAD:
        assert importlib.util.find_spec(f"lookahead_vllm.engine.{name}")


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
