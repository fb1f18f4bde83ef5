"""Triton's kernels run under Triton's interpreter, in a process of their own (`test_triton.py`).

There, they compute for tensors on a CPU, and only tests with the marker `interpreted` run.
"""

import os
from pathlib import Path

import pytest

from lookahead_vllm.verify.devices import ON_CPUS, ON_GPUS

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    ON_CPUS.update(ON_GPUS)


def _runs(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("interpreted")
    if IS_INTERPRETED:
        return marker is not None
    return marker is None or bool(marker.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items[:] = [item for item in items if not item.path.is_relative_to(here) or _runs(item)]
