"""Every kernel for CPUs computes what vLLM's Triton kernel computes under Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from lookahead_vllm.engine.cpu_kernels import table
from tests.engine.cpu_kernels import cases
from tests.engine.cpu_kernels import logit_cases as logit_cases  # which registers its cases
from tests.engine.cpu_kernels import speculator_cases as speculator_cases

IS_INTERPRETED = "TRITON_INTERPRETED" in os.environ
"""Whether Triton interprets vLLM's kernels in this process."""


@pytest.mark.skipif(not IS_INTERPRETED, reason="in a process of its own")
@pytest.mark.parametrize("kernel", sorted(cases.CASES))
def test_a_kernel_equals_vllms(kernel, monkeypatch):
    module, name = table.home_of(kernel)
    for seed in range(2):
        expected = cases.CASES[kernel](torch.Generator().manual_seed(seed))
        with monkeypatch.context() as patch:
            patch.setattr(module, name, table.load()[kernel])
            actual = cases.CASES[kernel](torch.Generator().manual_seed(seed))
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(IS_INTERPRETED, reason="this is it")
def test_every_kernel_equals_vllms():
    pytest.importorskip("triton")
    assert set(cases.CASES) == set(table.load())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__],
        env={**os.environ, "TRITON_INTERPRETED": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{len(cases.CASES)} passed" in done.stdout
