"""The tools for a machine with a GPU, as far as they run without one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer

from benchmarks.gpu import accuracy, case, other_kernels
from benchmarks.gpu.bundle import pack
from benchmarks.gpu.processes import Limit, in_processes
from lookahead_vllm.engine.cpu_kernels import table
from lookahead_vllm.engine.step import tail
from lookahead_vllm.verify.attention import paged_attention
from lookahead_vllm.verify.layout.paged_batch import CAUSAL
from tests.support import graph_engine, recorded_graphs

ROOT = Path(__file__).parents[2]


# The inputs of gpu_check.py.


def test_every_case_is_checked_against_attention_by_the_book(monkeypatch):
    monkeypatch.setattr(case, "DEVICE", "cpu")
    options = {"sliding_window": 40, "soft_cap": 5.0, "alibi_slopes": True, "sinks": True}
    mixed = case.Case([70, 0, 9], [33, 5, 12], causal=(2,), dtype=torch.float32, options=options)
    assert mixed.batch.firsts.tolist() == [0, 34, CAUSAL]
    assert mixed.error("reference") < mixed.max_error == 1e-5
    assert case.Case([20], [9], fp8=True, heads_first=True).error("reference") < 1e-2


@pytest.mark.parametrize(
    "name", ["rows", "penalties", "bad words", "thinking", "latent", "choices", "contexts"]
)
def test_the_other_kernels_are_checked(name, monkeypatch):
    """Those of a CPU stand in for them."""
    for module in (other_kernels, case):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for found, check in other_kernels.checks():
        if name in found:
            row = check()
            assert row.get("error", 0) < row.get("bound", 1)


def test_contexts_that_are_merged_with_other_weights_are_found(monkeypatch):
    def attend(call):
        paged_attention(call._replace(context_lse=call.context_lse + 0.1))

    for module in (other_kernels, case):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(other_kernels, "paged_attention", attend)
    row = other_kernels.check_merge(64)
    assert row["error"] > row["bound"]


class _LateGraph(recorded_graphs.RecordedGraph):
    """Runs when the host awaits an event."""

    launched: ClassVar[list[Callable[[], None]]] = []

    def replay(self) -> None:
        self.launched.append(super().replay)


@pytest.fixture
def graphs(monkeypatch):
    """Graphs on a CPU, where what is launched outside of them runs at once."""

    @contextmanager
    def capture(graph):
        with recorded_graphs._capturing(graph), recorded_graphs._Operators():
            yield

    recorded_graphs.enable(monkeypatch)
    monkeypatch.setattr(other_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "graph", capture)


@pytest.mark.parametrize("fault", [None, "waits for the first replay", "waits for nothing"])
def test_an_event_that_does_not_wait_for_each_replay_is_found(fault, graphs, monkeypatch):
    def synchronize():
        if fault is None or (fault.endswith("replay") and not waits):
            [launched() for launched in _LateGraph.launched]
            _LateGraph.launched.clear()
        waits.append(1)

    waits: list[int] = []
    event = SimpleNamespace(record=lambda: None, synchronize=synchronize)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _LateGraph)
    monkeypatch.setattr(torch.cuda, "Event", lambda external: event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    _LateGraph.launched.clear()
    with pytest.raises(AssertionError, match="did not wait") if fault else nullcontext():
        other_kernels.check_event()


@pytest.mark.parametrize("fault", [None, "ids", "entries", "slots", "sampled"])
def test_a_captured_tail_that_reads_other_rows_is_found(fault, graphs, monkeypatch):
    """Kernels of a CPU stand in for those of a GPU."""
    monkeypatch.setattr("vllm.v1.worker.gpu.buffer_utils.UvaBuffer", UvaBuffer)
    table.install()
    monkeypatch.setattr(other_kernels, "PagedKVMover", graph_engine._Mover)
    original, sample = tail.run_tail, tail.Draws.sample

    def run_tail(logits, rows, *args):
        if recorded_graphs._captured and fault in rows._fields:
            with _disable_current_modes():
                rows = rows._replace(**{fault: getattr(rows, fault).clone()})
        return original(logits, rows, *args)

    monkeypatch.setattr(tail, "run_tail", run_tail)
    if fault == "sampled":
        monkeypatch.setattr(tail.Draws, "sample", lambda *args: sample(*args) ^ 1)
    with pytest.raises(AssertionError) if fault else nullcontext():
        for options in ((torch.float32, 8), (torch.bfloat16, 0)):
            other_kernels.check_tail(*options)


@pytest.mark.parametrize("row", [{}, {"stopped": "the time was up"}, None])
def test_kernels_that_were_not_checked_are_not_right(row, monkeypatch):
    ended = [] if row is None else [(0, row)]
    monkeypatch.setattr(accuracy, "checks", lambda: [(accuracy.OTHERS, "choices", dict)])
    monkeypatch.setattr(accuracy, "in_processes", lambda *_: ended)
    assert accuracy.check_kernels({}, lambda: None, 60) is (row == {})


# What ends in time, and what a failure of the device stops.


def test_a_process_is_replaced_once_something_has_failed_in_it():
    own = "dict(pid=__import__('os').getpid())"
    tasks = [own, own, "dict(raised='an illegal access')", own, "__import__('os')._exit(9)", own]
    rows = [row for _, row in in_processes(eval, tasks, 1, None)]
    first, same, _, after_raising, ended, after_ending = rows
    assert first == same and ended == {"raised": "its process has ended (9)"}
    assert first["pid"] != after_raising["pid"] != after_ending["pid"]


def test_a_task_under_way_is_stopped_when_the_time_is_up():
    start, sleep = time.monotonic(), "__import__('time').sleep(60)"
    assert [*in_processes(eval, [sleep, sleep], 1, 1)] == [(sleep, {"stopped": "the time was up"})]
    assert time.monotonic() - start < 30


def test_a_command_is_interrupted_when_the_time_is_up():
    program = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(60)"
    start = time.monotonic()
    assert Limit(4).run([sys.executable, "-c", program]) == "the time was up"
    assert time.monotonic() - start < 30
    assert Limit(None).run([sys.executable, "-c", "raise SystemExit(3)"]) == "failed (3)"
    assert Limit(60).run([sys.executable, "-c", ""]) == "well"
    assert Limit(0).run(["nothing"]) == "left out: the time was up"


@pytest.mark.parametrize(("seconds", "code"), [(60, -signal.SIGKILL), (0, 0)])
def test_an_engine_under_way_ends_when_the_benchmark_was_killed(seconds, code, tmp_path):
    """With all processes of its group; one that waits for a question ends by itself."""
    job = tmp_path / "job.json"
    job.write_text("{}")
    program = f"""
import subprocess, sys, time
from benchmarks.engines.engine_process import answer_questions
def run(job, questions, emit):
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({seconds})"])
    time.sleep({seconds})
    assert [*questions] == ["a question"]
answer_questions(run)
"""
    command = [sys.executable, "-c", program, str(job)]
    with subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        engine.communicate(b'"a question"\n', timeout=40)  # until the last one of the group ends
        assert engine.returncode == code


def test_no_test_is_run_after_a_failure_of_the_device(tmp_path):
    (tmp_path / "test_it.py").write_text("""
import torch
def test_a():
    def fail(): raise RuntimeError("an illegal memory access")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fail
def test_b(): pass
""")
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks" / "gpu")])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "on_a_gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "test_it.py"], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "test_a PASSED" in said and "test_b" not in said
    assert "an illegal memory access" in said and "failed in test_it.py::test_a" in said


# The bundle.


def test_a_bundle_says_which_python_it_was_made_for(tmp_path):
    made = {"python": "2.7", "archives": {}, "folders": []}
    (tmp_path / "bundle.json").write_text(json.dumps(made))
    script = str(ROOT / "benchmarks" / "gpu" / "bundle" / "unpack.py")
    command = [sys.executable, "-I", script, str(tmp_path), str(tmp_path / "target")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "target").exists()
    assert "the bundle was made for 2.7: set PYTHON" in done.stderr


def test_files_of_another_vllm_are_laid_over(tmp_path, capsys):
    for name, text in (
        ("site/vllm/a.py", "old"),
        ("site/vllm/b.py", "kept"),
        ("other/vllm/a.py", "new"),
        ("other/vllm/suffix/c.py", "added"),
        ("other/setup.py", "not vLLM's"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pack.lay_over(tmp_path / "other", tmp_path / "site")
    found = {path.name: path.read_text() for path in (tmp_path / "site").rglob("*.py")}
    assert found == {"a.py": "new", "b.py": "kept", "c.py": "added"}
    said = capsys.readouterr().out
    assert "vllm/a.py replaces that of 0.33" in said and "vllm/suffix/c.py is new" in said


def test_it_needs_only_torch_and_triton_and_reports_a_missing_gpu():
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
