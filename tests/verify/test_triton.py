"""Runs the tests of Triton's kernels under Triton's interpreter."""

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead_vllm.verify import native


@pytest.mark.parametrize("path", sorted(Path(native.__file__).parent.glob("*/triton.py")))
def test_kernels_can_be_read_by_older_releases(path):
    """Triton 3.6 refuses `(a, b), c = d`; a machine with a GPU may have it."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    kernels = [
        f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)
    ]
    assert kernels
    for node in itertools.chain.from_iterable(map(ast.walk, kernels)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            assert not any(isinstance(e, ast.Tuple) for e in node.targets[0].elts), ast.unparse(
                node
            )


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
