"""A Ray cluster of one node on this machine, on which vLLM's engines run on CPUs.

vLLM's Ray executors give each rank a device that Ray counts, and vLLM's CPU platform names none. So
a platform plugin adds the name, and the node is started with as many devices of that name as there
are ranks. Nothing else of vLLM or Ray is changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from vllm.platforms.cpu import CpuPlatform

from benchmarks.serving.server import free_port
from tests.support.servers import END_SECONDS

ROOT = Path(__file__).resolve().parents[2]
STARTS = 3
START_SECONDS = 300


class CountedCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, with a device that Ray counts."""

    ray_device_key = "GPU"


def platform() -> str:
    """The entry point of vLLM's group `vllm.platform_plugins`."""
    return f"{__name__}.{CountedCpuPlatform.__name__}"


class RayCluster(NamedTuple):
    """A running cluster."""

    pid: int
    """Of `ray start`."""

    def ranks(self) -> list[psutil.Process]:
        """The processes of vLLM's workers."""
        return [p for p in _descendants(self.pid) if _is_rank(p)]

    def wait_until_idle(self) -> None:
        """Wait until no worker of vLLM is left."""
        deadline = time.monotonic() + END_SECONDS
        while ranks := self.ranks():
            assert time.monotonic() < deadline, f"workers go on: {ranks}"
            time.sleep(0.1)


def _is_rank(process: psutil.Process) -> bool:
    """Ray names a process after its actor, and vLLM then after the rank."""
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "RayWorker" in title or "VLLM" in title


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def running(folder: Path, patch: pytest.MonkeyPatch, ranks: int = 2) -> Iterator[RayCluster]:
    """Start a cluster with room for `ranks` workers; engines that start in the block use it.

    The folder, which is empty, gets the plugin and the log. The caller undoes the patch, which sets
    the environment of this process.
    """
    import ray
    from vllm.utils.system_utils import get_mp_context

    _install_plugin(folder, patch)
    host, log = ray.util.get_node_ip_address(), folder / "ray.log"
    patch.setenv("VLLM_HOST_IP", host)  # vLLM asks for a node with this name
    patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # it ends workers if others fill the memory
    patch.setenv("RAY_worker_niceness", "0")  # by default, busy machines starve the ranks
    patch.setenv("RAY_AUTH_MODE", "disabled")  # the user may have a token, for other clusters
    # A fork has chosen its platform before the plugin was there.
    patch.setattr("vllm.v1.engine.utils.get_mp_context", get_mp_context)
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path has at most 107 bytes
    process = None
    try:
        for attempt in range(STARTS):  # another program may take a port before Ray does
            address = f"{host}:{free_port()}"
            process = _start(address, ranks, Path(sockets, str(attempt)), log)
            if _has_started(process, log):
                break
            _end(process)
        else:
            raise AssertionError(f"Ray did not start {STARTS} times:\n{log.read_text()[-3000:]}")
        patch.setenv("RAY_ADDRESS", address)
        yield RayCluster(process.pid)
    finally:
        if process is not None:
            _end(process)
        shutil.rmtree(sockets, ignore_errors=True)


def _start(address: str, ranks: int, sockets: Path, log: Path) -> subprocess.Popen[bytes]:
    host, _, port = address.rpartition(":")
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block"]
    command += [f"--node-ip-address={host}", f"--port={port}", f"--num-gpus={ranks}"]
    command += [f"--num-cpus={ranks}", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--object-store-memory=100000000", f"--temp-dir={sockets}"]
    with log.open("w") as sink:
        return subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)


def _has_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if "Ray runtime started" in log.read_text():
            return True
        time.sleep(0.1)
    return False


def _install_plugin(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let all processes of vLLM that start from now on find `platform`."""
    info = folder / "cpus_on_ray-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpus-on-ray\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.platform_plugins]\ncpus_on_ray = {__name__}:{platform.__name__}\n"
    )
    for path in (ROOT, folder):
        patch.syspath_prepend(str(path))  # spawned processes get this one's
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), str(ROOT), *others])))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End `ray start` and all its processes."""
    descendants = _descendants(process.pid)
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    for survivor in psutil.wait_procs(descendants, timeout=END_SECONDS)[1]:
        survivor.kill()
