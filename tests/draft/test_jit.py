"""Compiled kernels are never older than the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lookahead_vllm
from lookahead_vllm.draft import jit
from lookahead_vllm.kernel_folder import sources_of_kernels

PACKAGE = Path(lookahead_vllm.__file__).parent


def test_every_module_with_a_kernel_is_hashed():
    hashed = sources_of_kernels(PACKAGE)
    with_kernel = [p for p in PACKAGE.rglob("*.py") if "kernel\ndef " in p.read_text()]
    assert len(with_kernel) > 8
    assert set(with_kernel) <= set(hashed)


def test_only_borrowing_kernels_take_views_from_borrowing_kernels():
    """Others would release a reference that was never counted, and so corrupt memory."""
    functions = [
        node
        for path in sources_of_kernels(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    borrowing = {f.name: f for f in functions if _decorator(f) == "borrowing_kernel"}
    assert len(borrowing) > 40
    numbers = {"int", "bool", "None", "np.float32", "np.int32", "np.int64", "np.uint64"}
    views = set()
    for name, function in borrowing.items():
        returned = ast.unparse(function.returns).removeprefix("tuple[").removesuffix("]")
        if not {part.strip() for part in returned.split(",")} <= numbers:
            views.add(name)
    assert views == {"nodes_of", "lookups_of"}
    for function in functions:
        called = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert _decorator(function) == "borrowing_kernel" or not called & views, function.name


def _decorator(function: ast.FunctionDef) -> str:
    return ast.unparse(function.decorator_list[0])


def _twice(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])  # numba's index, and its compiled code
@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_damaged_file_in_the_cache_is_replaced(tmp_path, monkeypatch, suffix, kept):
    monkeypatch.setattr(jit, "_folder", lambda: str(tmp_path))
    assert jit.kernel(_twice)(2) == 4
    (file,) = tmp_path.rglob(f"*.{suffix}")
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    for hits in (0, 1):
        kernel = jit.kernel(_twice)
        assert kernel(2) == 4
        assert sum(kernel.stats.cache_hits.values()) == hits


ENDS_A_PROCESS_AT_EXIT = """
import lookahead_vllm.draft.progress
import multiprocessing, time, weakref

class Manager:
    pass

process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
process.start()
manager = Manager()
weakref.finalize(manager, process.terminate)
"""


def test_a_script_that_imports_kernels_first_ends_its_processes():
    """Like vLLM, whose `LLM` ends its engine process in a finalizer."""
    command = [sys.executable, "-c", ENDS_A_PROCESS_AT_EXIT]
    assert subprocess.run(command, timeout=120, cwd=PACKAGE.parent).returncode == 0
