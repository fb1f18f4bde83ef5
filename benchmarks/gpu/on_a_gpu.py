"""Run the project's tests and its fuzzer on a GPU.

    PYTHONPATH=.:benchmarks/gpu python -m pytest -p on_a_gpu tests/engine/test_exactness.py
    PYTHONPATH=. python benchmarks/gpu/on_a_gpu.py scripts/fuzz.py --minutes 2

Importing this module sets environment variables that vLLM reads. As a plugin of pytest, it ends
the session after a test in which the device has failed, because all others would fail, too.
"""

import os
import runpy
import sys

ENVIRONMENT = {
    # By default vLLM's Triton attention rounds float32 to TF32.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def pytest_runtest_logfinish(nodeid: str) -> None:
    import pytest
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as reason:
        pytest.exit(f"{reason}\nThe device has failed in {nodeid}: no test after it was run.", 1)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
