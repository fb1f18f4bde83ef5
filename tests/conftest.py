"""Engines run in the test process, so that tests can inspect and patch them."""

import math
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("LOOKAHEAD_VLLM_PLAIN_V2", "1")  # with which lookahead is compared
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "120")  # on a busy machine

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Each worker of `pytest -n` has its own cores, so engines do not wait for each other's threads.
    cores = sorted(os.sched_getaffinity(0))
    first, step = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, cores[first::step] or cores)

if "TRITON_INTERPRETED" in os.environ:
    from tests.support import triton_interpreter

    triton_interpreter.enable()


@pytest.fixture(scope="session", autouse=True)
def _insert_whole_texts() -> Iterator[None]:
    """Remove the time limit on insertion, so that no test depends on the speed of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookahead_vllm.draft.insertion.MAX_SECONDS", math.inf)
        yield


LONG_FILES = (
    "test_tensor_parallel.py",
    "test_fuzz.py",
    "test_data_parallel.py",
    "test_hostile.py",
    "test_request_parity.py",
    "test_triton.py",
    "test_triton_compiles.py",
    "test_native.py",
    "test_lookahead_parallel.py",
    "test_pipeline_parallel.py",
)
"""They take a minute or more, and begin first: at the end, a process of `pytest -n` would work on
one of them while the others have nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
